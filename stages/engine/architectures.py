"""Which models run here, and in which engine, judging by the configuration.

The torch engine's slot cache fits models that use transformers' attention interface, since their layers call an attention
function that the engine provides. Other causal language models run in the model engine, by their own forward pass with their own
cache. Both engines also compare themselves with the model's own forward pass when they are created (see self_check); the checks
here fail earlier, before anything is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OWN_ATTENTION = ("gpt_neo",)
"""Model types that bypass the attention interface and are patched in `stages.engine.forward`."""
PLAIN = ("llama",)
"""Model types whose config.json suffices here, which avoids importing transformers' configurations (seconds)."""
SERVED = "Llama, Mistral, Mixtral, Qwen 2 and 3, SmolLM3, Gemma 3 (text), Phi-3, Starcoder2, GPT-2 and GPT-Neo"
LAYER_TYPES = {"full_attention", "sliding_attention"}


def windows(config: Any) -> list[int | None]:
    """How many positions a token attends to in each layer, its own included; None: no limit."""
    layers = config.num_hidden_layers
    if config.model_type == "gpt_neo":
        return [config.window_size if kind == "local" else None for kind in config.attention_layers]
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The parameters of each kind of rotary embedding in the model."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope for rope in found.values() if rope] if all(isinstance(rope, dict) for rope in found.values()) else [found]


def _too_long(config: Any, max_length: int) -> str | None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit and 0 < limit < max_length:  # XLNet's -1: no limit
        return f"model.max_length is {max_length}, but the model's max_position_embeddings is {limit}: lower model.max_length"
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if rope.get("rope_type", rope.get("type")) == "longrope" and original and max_length > original:
            return (
                f"model.max_length is {max_length}, but beyond {original} tokens the model's longrope rescales all earlier "
                f"positions, which a key/value cache does not support: lower model.max_length to at most {original}"
            )
    return None


def _no_causal_model(config: Any) -> str | None:
    """Why no engine here can run the model, or None."""
    if any(getattr(config, name, None) is not None for name in ("text_config", "vision_config", "audio_config")):
        return "it is multimodal"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    if config.model_type in (*PLAIN, *OWN_ATTENTION):
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return None if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else "transformers has no causal language model of that type"


def unslotted(config: Any) -> str | None:
    """Why the torch engine's slot cache does not fit a model that `unserved` accepts, or None."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if kinds:
        return f"it has layers of type {', '.join(kinds)}"
    if getattr(config, "kv_lora_rank", None):
        return "its key/value cache is compressed (latent attention)"
    if config.model_type in (*PLAIN, *OWN_ATTENTION):
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return None if model._supports_attention_backend else "its attention does not use transformers' attention interface"


def unserved(config: Any, max_length: int) -> str | None:
    """Why no engine here supports sessions of `max_length` tokens with this configuration, and what to do; None if one does."""
    if reason := _no_causal_model(config):
        name = (getattr(config, "architectures", None) or ["a model"])[0]
        return (
            f"{name} (model_type {config.model_type}) is not supported: {reason}. Set model.path to a causal language model such "
            f"as {SERVED}"
        )
    return _too_long(config, max_length)


def read_config(path: Path) -> Any:
    """The configuration in a (non-adapter) model folder. Raises ValueError for a model type unknown to transformers."""
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if values.get("model_type") in PLAIN:
        return SimpleNamespace(**values)
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True)


def check_served(folder: Path, max_length: int) -> None:
    """Raise ValueError if no engine here supports the model in `folder` (for an adapter, its base), without reading
    weights. A folder without a configuration passes; loading it reports what is missing."""
    from stages.engine.adapters import Adapter, is_adapter

    if is_adapter(folder):
        folder = Adapter(folder).base
    if (folder / "config.json").is_file() and (reason := unserved(read_config(folder), max_length)):
        raise ValueError(f"{folder}: {reason}")


def check_path(name: str, root: Path, max_length: int) -> None:
    """Apply `check_served` to `model.path`, a folder relative to `root` or a hub model. A hub model that is not in the local
    cache is checked by the stage that downloads it."""
    if not name.startswith("hub:"):
        check_served(root / name, max_length)
    elif folder := cached_config(name.removeprefix("hub:")):
        check_served(folder, max_length)


def cached_config(name: str) -> Path | None:
    """The folder in the local Hugging Face cache with the config.json of hub model `name` (org/name[@revision]), if any."""
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = name.partition("@")
    found = try_to_load_from_cache(repository, "config.json", revision=revision or None)
    return Path(found).parent if isinstance(found, str) else None
