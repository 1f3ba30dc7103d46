"""Reads LoRA adapter folders in peft's format, without peft.

A folder holds adapter_config.json, adapter_model.safetensors and the tokenizer. Its `base_model_name_or_path` is relative to the
folder itself or to the nearest parent where it exists: stages write `data/models/sft`, which is found wherever the repository is,
and by peft if the process runs in the repository's root.

A weight W of the base becomes W + s B A with s = lora_alpha / r, computed in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""peft's prefix of the base model's weight names."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_REFUSED: tuple[str, ...] = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "lora_bias",
    "target_parameters",
)
_REFUSED += ("layer_replication", "trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora")


class AdapterError(ValueError):
    """An adapter folder can't be used."""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def low_rank(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * b @ a in float32: a [rank, in], b [out, rank] -> [out, in]."""
    return (b.float() @ a.float()) * scale


class Adapter:
    """An adapter folder: `base` is its base model's folder, `names` the sorted base weights that it changes.

    Raises AdapterError if the base is not found or the adapter is not plain LoRA of linear layers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / WEIGHTS
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        self._refuse(config)
        rank = int(config["r"])
        self.scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        self.base = self._find_base(str(config.get("base_model_name_or_path")))
        self.names = self._read_names()

    def _refuse(self, config: dict[str, Any]) -> None:
        used = [name for name in _REFUSED if config.get(name)]
        if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or used:
            what = f"peft_type {config.get('peft_type')}, bias {config.get('bias', 'none')}" + "".join(
                f", {name}" for name in used
            )
            raise AdapterError(
                f"{self.folder / CONFIG}: only plain LoRA of linear layers is supported, but this adapter has {what}; merge the "
                "adapter into its base with peft (merge_and_unload) and use the merged model"
            )

    def _find_base(self, name: str) -> Path:
        folder = self.folder.absolute()
        for place in (folder, *folder.parents):
            base = place / name
            if base.is_dir():
                if is_adapter(base):
                    raise AdapterError(f"{self.folder / CONFIG}: base model {base} is itself an adapter; it must be a full model")
                return base
        raise AdapterError(
            f"{self.folder / CONFIG}: the base model '{name}' (base_model_name_or_path) was not found relative to {folder} or "
            "any parent folder; restore the base, or set base_model_name_or_path to its path"
        )

    def _read_names(self) -> list[str]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.path), framework="pt") as handle:
                keys = set(handle.keys())
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{self.path} cannot be read ({error}); make the adapter again") from error
        names = sorted(key.removeprefix(PREFIX).removesuffix(_A) + ".weight" for key in keys if key.endswith(_A))
        expected = {key for name in names for key in self._keys(name)}
        if not names or keys != expected:
            odd = sorted(keys ^ expected) or ["no lora_A"]
            raise AdapterError(f"{self.path} must contain only pairs of lora_A and lora_B under '{PREFIX}'; offending: {odd[0]}")
        return names

    @staticmethod
    def _keys(name: str) -> tuple[str, str]:
        module = PREFIX + name.removesuffix(".weight")
        return module + _A, module + _B

    def delta(self, name: str) -> Tensor:
        """The adapter's change of base weight `name` (one of `names`): [out, in] float32."""
        from safetensors import safe_open

        with safe_open(str(self.path), framework="pt") as handle:
            a, b = (handle.get_tensor(key) for key in self._keys(name))
        return low_rank(a, b, self.scale)

    def deltas(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            yield name, self.delta(name)


def fold(model: Any, deltas: Iterable[tuple[str, Tensor]]) -> None:
    """Add each (name, delta) to the named parameter, in float32. Raises AdapterError for an unknown name or another shape."""
    import torch

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, delta in deltas:
        weight = parameters.get(name)
        if weight is None or weight.shape != delta.shape:
            found = "lacks it" if weight is None else f"has it as {list(weight.shape)}"
            raise AdapterError(f"the adapter changes {name} {list(delta.shape)}, and its base ({type(model).__name__}) {found}")
        with torch.no_grad():
            weight.copy_(weight.float() + delta.to(weight.device))
