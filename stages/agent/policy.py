"""The policy: a Hugging Face causal LM and its tokenizer in a `save_pretrained` folder, or a LoRA adapter folder beside its base.
Loading, hashing, saving, log-probs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from stages.agent.chat_template import DATE_KEY, prompt_date
from stages.engine.adapters import CONFIG, WEIGHTS, Adapter, fold, is_adapter
from stages.engine.attention import use_attention
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
    """A model can't be loaded; the message says which file and what to do."""


@dataclass(frozen=True)
class Policy:
    """A loaded model. `hash` names its weights, configuration and tokenizer."""

    model: Any
    tokenizer: Any
    folder: Path
    hash: str


def _quiet() -> None:
    """No progress bars for reading and writing files: stages show their own progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _offline() -> bool:
    import huggingface_hub.constants as constants

    return bool(constants.HF_HUB_OFFLINE)


def _download(name: str) -> Path:
    """The local folder of a hub model, downloaded if need be. Raises PolicyError if it's neither cached nor reachable."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    repository, _, revision = name.partition("@")
    offline = _offline()
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
    """Raise PolicyError if a safetensors file is shorter than its header says."""
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
    """Raise PolicyError if `folder` is not a whole `save_pretrained` folder with safetensors weights and a tokenizer, or not a
    whole adapter folder with a tokenizer and a base; AdapterError if the adapter is of a kind that is not supported."""
    if not folder.is_dir():
        raise PolicyError(
            f"model folder {folder} does not exist; check model.path in params.yaml, or restore it: 'dvc repro' makes those of "
            f"stages, 'git checkout data/base' the base. A hub model is written '{HUB}org/name'"
        )
    adapter = is_adapter(folder)
    for name in (CONFIG if adapter else "config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise PolicyError(f"{folder / name} is missing; {folder} is not a whole save_pretrained folder: restore or remake it")
    index = folder / "model.safetensors.index.json"
    if adapter:
        names = [WEIGHTS]
    elif index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise PolicyError(
                f"{folder / name} is missing: the weights must be there as safetensors; restore or remake the folder"
            )
        _check_safetensors(folder / name)
    if adapter:
        check_folder(Adapter(folder).base)


def policy_hash(folder: Path | str) -> str:
    """16 hex digits of sha256 over the names and bytes of the weights, configuration and tokenizer files, sorted by name; an
    adapter's takes its base's hash in."""
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
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def usable_device(name: str) -> torch.device:
    """The device called `name` (cpu, cuda, cuda:1). Raises PolicyError if this machine or this torch has none such."""
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise PolicyError(
                f"resources.device is {name}, and torch {torch.__version__} sees {count} CUDA devices here; set it to cpu, or "
                "install a torch built for CUDA"
            )
    return device


def load_policy(
    path: Path | str, *, device: str = "cpu", precision: str = "float32", attention: str = "eager", root: Path | None = None
) -> Policy:
    """Load a model in evaluation mode from a folder (relative ones are below `root`) or `hub:org/name[@revision]`. An adapter
    folder gives its base with the adapter folded in.

    Raises PolicyError for a missing folder or file, truncated or incomplete weights, or a hub name that can't be fetched;
    AdapterError for an adapter that does not fit.
    """
    from transformers import AutoModelForCausalLM

    _quiet()
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
            f"{folder}: the weights lack {len(lacking)} tensors that config.json calls for, {lacking[0]} first; they would "
            "be left random. The folder mixes two models or is incomplete: restore or remake it"
        )
    model.to(usable_device(device)).eval()
    if adapter:
        fold(model, adapter.deltas())
    _check_head(model, folder)
    return Policy(model, load_tokenizer(folder), folder, policy_hash(folder))


@torch.no_grad()
def _check_head(model: Any, folder: Path) -> None:
    """Raise PolicyError for a model that does more to its hidden states than apply its output layer (scaling, soft caps)."""
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    whole = model(input_ids=ids, use_cache=False).logits
    parts = model.get_output_embeddings()(hidden_states(model, ids))
    if not torch.allclose(whole.float(), parts.float(), atol=1e-3, rtol=1e-3):
        raise PolicyError(
            f"{folder}: {type(model).__name__} transforms its logits after the output layer, which is not supported"
        )


def save_policy(model: Any, tokenizer: Any, folder: Path | str, *, max_shard_size: int | str = "5GB") -> None:
    """Write a `save_pretrained` folder whose bytes depend on the weights, configuration and tokenizer alone."""
    write_folder(Path(folder), tokenizer, lambda partial: model.save_pretrained(partial, max_shard_size=max_shard_size))


def write_folder(folder: Path, tokenizer: Any, write: Callable[[Path], object]) -> None:
    """Write a model's folder, whole or not at all: what `write` puts into the folder it is given, and the tokenizer."""
    _quiet()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Calls with padding or truncation leave their settings in the tokenizer.
        backend.no_padding()
        backend.no_truncation()
    with atomic_folder(folder) as partial:
        write(partial)
        tokenizer.save_pretrained(partial)
        # How it was loaded is no part of a tokenizer.
        path = partial / "tokenizer_config.json"
        settings = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in _LOADED_BY}
        if (day := prompt_date(tokenizer)) is not None:
            settings[DATE_KEY] = day
        path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def hidden_states(model: Any, token_ids: Tensor) -> Tensor:
    """Last hidden states [B, T, D], after the final norm, of right-padded `token_ids` [B, T].

    Attention is causal, so padding on the right reaches no real token and needs no mask.
    """
    return model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state


Read = Callable[..., tuple[Tensor, ...]]
"""(logits over temperature [c, V] float32, slices [c] of what came along) -> numbers [c] each."""


def through_head(
    model: Any, hidden: Tensor, read: Read, *along: Tensor, temperature: float = 1.0, chunk: int = 8192
) -> list[Tensor]:
    """What `read` takes from the logits over the whole vocabulary at each of hidden states [N, D]: [N] float32 each; `along`: [N]
    tensors that it gets the same places of.

    The output layer, too, computes in float32, under autocast and with weights of less precision: logits of bfloat16 are up to
    1/256 of themselves away, and ratios of probabilities with them. `chunk` rows at a time; with gradients on, the chunks' logits
    are recomputed in the backward pass rather than kept, so that memory is chunk x vocabulary whatever N is.
    """
    head = model.get_output_embeddings()

    def part(hidden: Tensor, *along: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            logits = _at_least_float32(head, hidden).float()
            return read(logits / temperature if temperature != 1.0 else logits, *along)

    parts = []
    recompute = torch.is_grad_enabled() and len(hidden) > chunk
    for start in range(0, max(len(hidden), 1), chunk):
        arguments = [tensor[start : start + chunk] for tensor in (hidden, *along)]
        parts.append(checkpoint(part, *arguments, use_reentrant=False) if recompute else part(*arguments))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _at_least_float32(layer: Any, inputs: Tensor) -> Tensor:
    """What a layer makes of `inputs`, both these and its weights taken as float32 if they are of less precision."""
    wanted = torch.promote_types(inputs.dtype, torch.float32)
    inputs = inputs.to(wanted)
    if all(parameter.dtype == wanted for parameter in layer.parameters()):
        return layer(inputs)
    return functional_call(layer, {name: parameter.to(wanted) for name, parameter in layer.named_parameters()}, (inputs,))


def head_logprobs(
    model: Any,
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int = 8192,
    entropy: bool = False,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [N] float32 of `targets` [N] given hidden states [N, D], and entropies [N] (nats) if asked for; as
    `score_tokens`."""
    read = _reading(entropy, entropy_gradient, vocabulary=False)
    logs, *others = through_head(model, hidden, read, targets, temperature=temperature, chunk=chunk)
    return logs, others[0] if entropy else None


def _reading(entropy: bool, entropy_gradient: bool, vocabulary: bool) -> Read:
    """Log-probability of the target, then its entropy, then what `Vocabulary` holds, as far as asked for."""

    def read(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logs = logits.log_softmax(-1)
        found = [logs.gather(-1, targets[:, None])[:, 0]]
        if entropy:
            sure = logs if entropy_gradient else logs.detach()
            found.append(-(sure.exp() * sure).sum(-1))
        if vocabulary:
            found += [logs.detach().mean(-1), logits.logsumexp(-1)]
        return tuple(found)

    return read


def predicting_states(model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Last hidden states [n, D] at the positions that predict the tokens where `mask` [B, T], in `mask.nonzero()`'s order."""
    rows, columns = mask.nonzero(as_tuple=True)
    return hidden_states(model, token_ids)[rows, columns - 1]


States = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, token_ids [B, T], mask [B, T]) -> hidden states [n, D], as `predicting_states`."""


@dataclass(frozen=True)
class Vocabulary:
    """What is known of a policy's whole distribution before each token, [B, T] float32, 0 off the mask."""

    mean: Tensor
    """Mean over the vocabulary of the log-probabilities, -log V - KL(uniform || policy); without gradient."""
    normaliser: Tensor
    """log sum exp of the logits (over temperature): a token's logit is its log-probability plus this."""


@dataclass(frozen=True)
class TokenScores:
    """Of the tokens where a mask is, [B, T] float32 each, 0 elsewhere; what was not asked for is None."""

    logprobs: Tensor
    entropy: Tensor | None = None
    """Nats."""
    vocabulary: Vocabulary | None = None


def token_scores(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    read: Read,
    *along: Tensor,
    temperature: float = 1.0,
    states: States = predicting_states,
    chunk: int = 8192,
) -> list[Tensor]:
    """What `read` takes from the logits before each token where `mask`, [B, T] float32 each, 0 elsewhere (see `through_head`).

    token_ids, mask and `along`: [B, T], padded on the right, the mask False at each sequence's first token. The output layer runs
    at the masked positions alone. `states` computes the hidden states (`predicting_states`, or another way to the same numbers).
    Raises ValueError if the mask covers a first token, which nothing predicts.
    """
    if bool(mask[:, 0].any()):
        raise ValueError("the mask covers the first token of a row; nothing comes before it that could predict it")
    rows, columns = mask.nonzero(as_tuple=True)
    hidden = states(model, token_ids, mask)
    chosen = (tensor[rows, columns] for tensor in along)
    found = through_head(model, hidden, read, *chosen, temperature=temperature or 1.0, chunk=chunk)
    nothing = torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device)
    return [nothing.index_put((rows, columns), numbers) for numbers in found]


def score_tokens(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    *,
    states: States = predicting_states,
    chunk: int = 8192,
    entropy: bool = False,
    entropy_gradient: bool = True,
    vocabulary: bool = False,
) -> TokenScores:
    """Log-probability of each token where `mask`, given the tokens before it, under softmax(logits / temperature), with entropies
    and `Vocabulary` if asked for; see `token_scores`. With `entropy_gradient` off entropies are numbers alone, which saves a
    matrix of logits in the backward pass."""
    read = _reading(entropy, entropy_gradient, vocabulary)
    settings: Any = {"temperature": temperature, "states": states, "chunk": chunk}
    logprobs, *others = token_scores(model, token_ids, mask, read, token_ids, **settings)
    spread = others.pop(0) if entropy else None
    return TokenScores(logprobs, spread, Vocabulary(*others) if vocabulary else None)


def token_logprobs(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    *,
    states: States = predicting_states,
    chunk: int = 8192,
    entropy: bool = False,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`logprobs` and `entropy` of `score_tokens`, [B, T] float32 each (or None)."""
    settings: Any = {"states": states, "chunk": chunk, "entropy": entropy, "entropy_gradient": entropy_gradient}
    found = score_tokens(model, token_ids, mask, temperature, **settings)
    return found.logprobs, found.entropy
