"""Loads, checks, hashes and saves policies: a Hugging Face causal LM with its tokenizer, or a LoRA adapter with its base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.agent.chat_template import DATE_KEY, prompt_date
from stages.agent.logprobs import hidden_states
from stages.engine.adapters import CONFIG, WEIGHTS, Adapter, fold, is_adapter
from stages.engine.attention import use_attention
from stages.engine.head import logits_of
from stages.engine.products import use_products
from stages.runtime.files import atomic_folder

HUB = "hub:"
_PARTS: tuple[str, ...] = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "vocab.*",
)
_PARTS += ("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model", CONFIG)
_LOADED_BY = ("is_local", "local_files_only", "name_or_path")


class PolicyError(ValueError):
    """A model can't be loaded."""


@dataclass(frozen=True)
class Policy:
    """A loaded model; `hash` identifies its weights, configuration and tokenizer (`policy_hash`)."""

    model: Any
    tokenizer: Any
    folder: Path
    hash: str


def _disable_progress_bars() -> None:
    """Stages show their own progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _download(name: str) -> Path:
    """The local folder of a hub model, downloaded if necessary. Raises PolicyError if it is neither cached nor reachable."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    repository, _, revision = name.partition("@")
    offline = bool(constants.HF_HUB_OFFLINE)
    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(_PARTS), local_files_only=offline)
        )
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise PolicyError(f"model.path '{HUB}{name}' names no model on the Hugging Face hub: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub can't be reached ({type(error).__name__})"
        raise PolicyError(
            f"model.path '{HUB}{name}' is not in the local Hugging Face cache and {why}. Run 'hf download {repository}' once "
            "with a network connection (and HF_HUB_OFFLINE unset), or set model.path to a local folder such as data/base"
        ) from error


def _check_safetensors(path: Path) -> None:
    """Raise PolicyError if the size of a safetensors file differs from what its header says."""
    size = path.stat().st_size
    advice = f"restore it ('dvc checkout {path}' or 'git checkout {path}'), or delete it and run the stage that makes it again"
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise PolicyError(f"{path} is truncated: {size} bytes do not hold its header; {advice}")
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            raise PolicyError(f"{path} is not a safetensors file (bad header: {error}); {advice}") from error
    expected = 8 + length + max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    if size != expected:
        raise PolicyError(f"{path} is truncated: it has {size} bytes of {expected}; {advice}")


def check_folder(folder: Path) -> None:
    """Raise PolicyError unless `folder` is a complete `save_pretrained` folder with safetensors weights and a tokenizer, or a
    complete adapter folder with a tokenizer and a base; AdapterError for an unsupported kind of adapter."""
    if not folder.is_dir():
        raise PolicyError(
            f"model folder {folder} does not exist; check model.path in params.yaml, or restore it: 'dvc repro' makes the "
            f"stages' models, 'git checkout data/base' restores the base model. Write a hub model as '{HUB}org/name'"
        )
    adapter = is_adapter(folder)
    for name in (CONFIG if adapter else "config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise PolicyError(
                f"{folder / name} is missing; {folder} is not a complete save_pretrained folder: restore or remake it"
            )
    index = folder / "model.safetensors.index.json"
    if adapter:
        names = [WEIGHTS]
    elif index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise PolicyError(f"{folder / name} is missing: weights must be stored as safetensors; restore or remake the folder")
        _check_safetensors(folder / name)
    if adapter:
        check_folder(Adapter(folder).base)


def policy_hash(folder: Path | str) -> str:
    """16 hex digits of sha256 over the names and bytes of the weights, configuration and tokenizer files, sorted by name; for an
    adapter, the base's hash comes first."""
    folder = Path(folder)
    digest = hashlib.sha256()
    if is_adapter(folder):
        digest.update(policy_hash(Adapter(folder).base).encode())
    for path in sorted({path for pattern in _PARTS for path in folder.glob(pattern) if path.is_file()}):
        digest.update(path.name.encode() + b"\0" + str(path.stat().st_size).encode() + b"\0")
        with path.open("rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def load_tokenizer(folder: Path | str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def usable_device(name: str) -> torch.device:
    """The device called `name` (cpu, cuda, cuda:1). Raises PolicyError if this machine or this build of torch lacks it."""
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise PolicyError(
                f"resources.device is {name}, and torch {torch.__version__} sees {count} CUDA devices here; set it to cpu, or "
                "install a CUDA build of torch"
            )
    return device


def load_policy(
    path: Path | str, *, device: str = "cpu", precision: str = "float32", attention: str = "eager", root: Path | None = None
) -> Policy:
    """Load a model in evaluation mode from a folder (relative to `root`) or `hub:org/name[@revision]`. An adapter is folded into
    its base.

    Raises PolicyError for a missing folder or file, truncated or incomplete weights, or a hub model that can't be fetched;
    AdapterError for an adapter that does not match its base.
    """
    from transformers import AutoModelForCausalLM

    _disable_progress_bars()
    name = str(path)
    if name.startswith(HUB):
        folder = _download(name.removeprefix(HUB))
    else:
        folder = Path(name) if root is None else root / name
    check_folder(folder)
    adapter = Adapter(folder) if is_adapter(folder) else None
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        adapter.base if adapter else folder,
        dtype=getattr(torch, precision),
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    model, loading = loaded
    use_attention(model, attention)
    lacking = sorted({*loading["missing_keys"], *(str(entry[0]) for entry in loading["mismatched_keys"])})
    if lacking:
        raise PolicyError(
            f"{folder}: the weights lack {len(lacking)} tensors that config.json requires (first: {lacking[0]}); they would be "
            "left random. The folder mixes two models or is incomplete: restore or remake it"
        )
    model.to(usable_device(device)).eval()
    use_products(model)
    if adapter:
        fold(model, adapter.deltas())
    check_head(model, folder)
    return Policy(model, load_tokenizer(folder), folder, policy_hash(folder))


@torch.no_grad()
def check_head(model: Any, folder: Path) -> None:
    """Raise PolicyError if the model changes its output layer's logits in a way that `stages.engine.head` does not know."""
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    logits = model(input_ids=ids, use_cache=False).logits
    head_logits = logits_of(model, hidden_states(model, ids))
    if not torch.allclose(logits.float(), head_logits.float(), atol=1e-3, rtol=1e-3):
        raise PolicyError(
            f"{folder}: {type(model).__name__} transforms its logits after the output layer in a way that is not supported"
        )


def save_policy(model: Any, tokenizer: Any, folder: Path | str, *, max_shard_size: int | str = "5GB") -> None:
    """Write a `save_pretrained` folder whose bytes depend only on the weights, configuration and tokenizer."""
    write_folder(Path(folder), tokenizer, lambda partial: model.save_pretrained(partial, max_shard_size=max_shard_size))


def write_folder(folder: Path, tokenizer: Any, write: Callable[[Path], object]) -> None:
    """Write a model folder atomically: `write` fills the folder it is given; the tokenizer is added."""
    _disable_progress_bars()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Earlier calls with padding or truncation leave these settings in the tokenizer.
        backend.no_padding()
        backend.no_truncation()
    with atomic_folder(folder) as partial:
        write(partial)
        tokenizer.save_pretrained(partial)
        path = partial / "tokenizer_config.json"
        settings = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in _LOADED_BY}
        if (day := prompt_date(tokenizer)) is not None:
            settings[DATE_KEY] = day
        path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
