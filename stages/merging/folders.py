"""Model folders as tensors by name, read one at a time from safetensors (single or sharded), and checks before a merge."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.engine.adapters import Adapter, is_adapter
from stages.merging.contract import MergeError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MERGEABLE = ("F64", "F32", "F16", "BF16")
_OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight")
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's file, dtype (as safetensors names it, e.g. "F32") and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def mergeable(self) -> bool:
        return self.dtype in MERGEABLE

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


class TensorFolder:
    """A `save_pretrained` folder's tensors by name. One shard is open at a time; tensors are not cached.

    A tied output embedding that is stored as well is left out, since `from_pretrained` ties it again. Raises MergeError for a
    missing folder, a missing or truncated file, or an index that does not match its shards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sources = [path]
        """Folders with the model's files besides its weights; later folders take precedence."""
        self._file: Path | None = None
        self._handle: Any = None
        if not path.is_dir():
            raise MergeError(f"model folder {path} does not exist; run the stage that creates it first")
        self.config: dict[str, Any] = self._json("config.json") if (path / "config.json").exists() else {}
        self.infos: dict[str, TensorInfo] = {}
        weight_map: dict[str, str] = self._json(INDEX)["weight_map"] if (path / INDEX).exists() else {}
        for file in self._files(weight_map):
            self._read_header(file, weight_map)
        absent = sorted(set(weight_map) - set(self.infos))
        if absent:
            raise MergeError(
                f"{path / INDEX} lists {absent[0]} in {weight_map[absent[0]]}, which lacks it; the folder is damaged"
            )
        self._untie()

    def _json(self, name: str) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise MergeError(f"{self.path / name} is not valid JSON ({error}); create the model again") from error
        return values

    def _files(self, weight_map: Mapping[str, str]) -> list[Path]:
        files = sorted({self.path / name for name in weight_map.values()}) or [self.path / SINGLE]
        for file in files:
            if not file.exists():
                why = f"is listed in {INDEX} but missing" if weight_map else "is missing (merging reads safetensors only)"
                raise MergeError(f"{file} {why}; run the stage that creates the model again")
        return files

    def _open(self, file: Path) -> Any:
        if self._file != file:
            self.close()
            try:
                self._handle = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise MergeError(
                    f"{file} cannot be read ({error}); it is truncated or damaged, create the model again"
                ) from error
            self._file = file
        return self._handle

    def _read_header(self, file: Path, weight_map: Mapping[str, str]) -> None:
        handle = self._open(file)
        for name in sorted(handle.keys()):
            if weight_map and weight_map.get(name) != file.name:
                continue
            part = handle.get_slice(name)
            self.infos[name] = TensorInfo(file, part.get_dtype(), tuple(part.get_shape()))

    def _untie(self) -> None:
        tied = self.config.get("tie_word_embeddings") or self.config.get("text_config", {}).get("tie_word_embeddings")
        if tied and any(name.endswith(_INPUT_EMBEDDINGS) for name in self.infos):
            self.infos = {name: info for name, info in self.infos.items() if not name.endswith(_OUTPUT_EMBEDDINGS)}

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, in its stored dtype."""
        file = self.infos[name].file
        try:
            loaded: Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise MergeError(f"{file}: tensor {name} cannot be read ({error}); create the model again") from error
        return loaded

    def close(self) -> None:
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._file = self._handle = None


class AdaptedFolder(TensorFolder):
    """A LoRA adapter folder as a full model: its base's tensors, with the adapter's deltas added on reading.

    Raises MergeError if the adapter changes tensors that its base lacks, AdapterError if its base is not found.
    """

    def __init__(self, path: Path) -> None:
        self.adapter = Adapter(path)
        super().__init__(self.adapter.base)
        self.path = path
        self.sources.append(path)
        self._changed = set(self.adapter.names)
        absent = sorted(self._changed - set(self.infos))
        if absent:
            raise MergeError(
                f"{path} changes {absent[0]}, which its base {self.adapter.base} lacks; restore the base it was made for"
            )

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`: in float32 if the adapter changes it, else in its stored dtype."""
        stored = super().tensor(name)
        return stored.float() + self.adapter.delta(name) if name in self._changed else stored


def open_folder(path: Path) -> TensorFolder:
    """The tensors of a model folder or an adapter folder."""
    return AdaptedFolder(path) if is_adapter(path) else TensorFolder(path)


def check_same_tensors(folders: Sequence[TensorFolder]) -> list[str]:
    """The tensors' names, sorted. Raises MergeError naming tensors that are missing, differ in shape or cannot be merged."""
    first = folders[0]
    for other in folders[1:]:
        for have, lack in ((first, other), (other, first)):
            missing = sorted(set(have.infos) - set(lack.infos))
            if missing:
                shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
                raise MergeError(
                    f"{lack.path} lacks {shown}, which {have.path} has; only models of one architecture can be merged"
                )
    for name in sorted(first.infos):
        for folder in folders:
            info = folder.infos[name]
            if info.shape != first.infos[name].shape:
                raise MergeError(
                    f"tensor {name} is {list(first.infos[name].shape)} in {first.path} and {list(info.shape)} in {folder.path}; "
                    "only models of one shape (and one vocabulary) can be merged"
                )
            if info.mergeable != first.infos[name].mergeable or info.dtype.startswith("F8"):
                raise MergeError(
                    f"tensor {name} is {first.infos[name].dtype} in {first.path} and {info.dtype} in {folder.path}; "
                    "quantised weights cannot be merged, take the models before quantisation"
                )
    return sorted(first.infos)


def _vocabulary(path: Path) -> Any:
    """Token ids of a fast tokenizer, without its padding and truncation settings."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = sorted((token["id"], token["content"]) for token in tokenizer.get("added_tokens", []))
    return tokenizer.get("model", {}).get("vocab"), added


def check_same_vocabulary(folders: Sequence[TensorFolder]) -> None:
    """Raise MergeError if two folders' tokenizers assign different token ids, which would mix up their embeddings."""
    paths = [folder.path / "tokenizer.json" for folder in folders if (folder.path / "tokenizer.json").exists()]
    for path in paths[1:]:
        if _vocabulary(path) != _vocabulary(paths[0]):
            raise MergeError(f"{path} and {paths[0]} assign different token ids; only models with one vocabulary can be merged")
