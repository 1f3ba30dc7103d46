"""Which models the torch engine serves, and how far back each of their layers looks, as their configuration alone says.

What transformers' attention interface runs is served: its layers hand queries, keys and values to a function of ours. The engine
compares itself with the model's own forward pass when it is made (see self_check); what is refused here is refused earlier,
before anything is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OWN_ATTENTION = ("gpt_neo",)
"""Model types that compute attention themselves, in a way that `stages.engine.decoder` knows."""
PLAIN = ("llama",)
"""Model types of which config.json says all that counts here: importing transformers' configurations takes seconds."""
SERVED = "Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 3 (text), Phi-3, Starcoder2, GPT-2 and GPT-Neo"
LAYER_TYPES = {"full_attention", "sliding_attention"}
SCALED = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}
"""What some models do to the output layer's logits, by key; with the value that does nothing. Training and the engine compute
log-probabilities from the output layer."""


def windows(config: Any) -> list[int | None]:
    """How many positions a token attends to in each layer, its own included; None for all earlier ones."""
    layers = config.num_hidden_layers
    if config.model_type == "gpt_neo":
        return [config.window_size if kind == "local" else None for kind in config.attention_layers]
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The parameters of each kind of rotary embedding that the model has."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope for rope in found.values() if rope] if all(isinstance(rope, dict) for rope in found.values()) else [found]


def _too_long(config: Any, max_length: int) -> str | None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit and max_length > limit:
        return f"model.max_length is {max_length}, but the model's max_position_embeddings is {limit}: lower model.max_length"
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if rope.get("rope_type", rope.get("type")) == "longrope" and original and max_length > original:
            return (
                f"model.max_length is {max_length}, and beyond {original} tokens the model's longrope turns all earlier tokens "
                f"anew, which a key/value cache cannot follow: lower model.max_length to at most {original}"
            )
    return None


def _foreign(config: Any) -> str | None:
    """Why the model's layers are not those that the engine runs, or None."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if any(getattr(config, name, None) is not None for name in ("text_config", "vision_config", "audio_config")):
        return "it is multimodal"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if kinds:
        return f"it has layers of type {', '.join(kinds)}"
    if getattr(config, "kv_lora_rank", None):
        return "its key/value cache is compressed (latent attention)"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention looks ahead"
    for name, idle in SCALED.items():
        if (value := getattr(config, name, None)) is not None and value != idle:
            return f"it changes its logits after the output layer ({name} {value})"
    if config.model_type in (*PLAIN, *OWN_ATTENTION):
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model of that type"
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    return None


def unserved(config: Any, max_length: int) -> str | None:
    """Why the torch engine does not serve sessions of `max_length` tokens of a model with this configuration, and what to do;
    None where it does."""
    if reason := _foreign(config):
        name = (getattr(config, "architectures", None) or ["a model"])[0]
        return (
            f"the torch engine, which rl plays with, does not serve {name} (model_type {config.model_type}): {reason}. Set "
            f"model.path to a causal language model such as {SERVED}"
        )
    return _too_long(config, max_length)


def read_config(path: Path) -> Any:
    """The configuration in the folder of a whole model; raises ValueError for a model type that transformers does not know."""
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if values.get("model_type") in PLAIN:
        return SimpleNamespace(**values)
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True)


def check_served(folder: Path, max_length: int) -> None:
    """Raise ValueError if the torch engine does not serve the model in `folder` (an adapter's base counts), without reading its
    weights. A folder without a configuration passes: whoever loads it says what is missing."""
    from stages.engine.adapters import Adapter, is_adapter

    if is_adapter(folder):
        folder = Adapter(folder).base
    if (folder / "config.json").is_file() and (reason := unserved(read_config(folder), max_length)):
        raise ValueError(f"{folder}: {reason}")


def check_path(name: str, root: Path, max_length: int) -> None:
    """`check_served` of `model.path`: a folder below `root`, or a hub model, whose configuration is looked up in the local cache;
    what is not there is checked by the stage that downloads it."""
    if not name.startswith("hub:"):
        check_served(root / name, max_length)
    elif folder := cached_config(name.removeprefix("hub:")):
        check_served(folder, max_length)


def cached_config(name: str) -> Path | None:
    """The folder in the local Hugging Face cache that holds the config.json of hub model `name` (org/name[@revision]), if any."""
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = name.partition("@")
    found = try_to_load_from_cache(repository, "config.json", revision=revision or None)
    return Path(found).parent if isinstance(found, str) else None
