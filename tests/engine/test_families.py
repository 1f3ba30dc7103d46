"""Every causal language model of transformers: the torch engine computes its log-probabilities, or rejects it by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import randomised
from test_architectures import play
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from stages.agent.logprobs import token_logprobs
from stages.engine.architectures import unserved
from stages.engine.torch_engine import TorchEngine

MAX_LENGTH = 96
LENGTHS = {0: 3, 1: 60, 2: 31}
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
TINY_FOR: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "roc_bert": {"pronunciation_vocab_size": 61, "shape_vocab_size": 61},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further values that some families need."""
SAMPLE = {
    "gemma3_text": "equal",
    "cohere": "logit_scale",
    "llama": "equal",
    "mamba": "linear_attention",
    "olmo2": "equal",
    "roberta": "differ from those of the model's own forward pass",
    "smollm3": "equal",
    "stablelm": "attention interface",
}
"""Families with what must come out, tested in every run."""
NOT_TINY = {
    "cohere_compass_text": "its default configuration has no rotary parameters for its layers' types",
    "dbrx": "its layers read a rotary base that its default configuration lacks",
    "dots3_note_text": "it requires as many key/value heads as heads",
    "gemma4_assistant": "it requires embeddings per layer of size 0",
    "gemma4_text": "its embeddings per layer have their own vocabulary",
    "gpt_neo": "it requires attention types for its number of layers; test_architectures makes one",
    "lfm2_moe": "its default configuration has no types of layers",
    "mamba2": "its number of heads must match its width",
    "xlnet": "its head size must match its width",
    "zamba": "its default types of layers are for more layers",
    "zamba2": "its default types of layers are for more layers",
}
"""Families that the values of TINY do not fit, with the reason."""
MOST = 5_000_000
"""Parameters of a model that counts as tiny."""


def tiny_config(name: str) -> Any:
    """The configuration of `name` with the values of TINY that it knows."""
    config = CONFIGS[name]
    known = vars(config())
    attributes = getattr(config, "attribute_map", {})
    values = {key: value for key, value in TINY.items() if attributes.get(key, key) in known}
    return config(**values | TINY_FOR.get(name, {}))


def check_size(config: Any) -> None:
    """Raise ValueError for a configuration of a large model, or what transformers raises for one that makes no model."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"{size:,} parameters")


def outcome(name: str) -> str:
    """'equal', or why the engine does not run the model."""
    config = tiny_config(name)
    if reason := unserved(config, MAX_LENGTH):
        assert name in reason
        return reason
    check_size(config)
    torch.manual_seed(0)
    model = randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    try:
        engine = TorchEngine(model, [], slots=4, max_length=MAX_LENGTH)
    except ValueError as error:
        reason = str(error)
    else:
        check_logprobs(engine, model)
        return "equal"
    assert type(model).__name__ in reason
    return reason


def check_logprobs(engine: TorchEngine, model: Any) -> None:
    for tokens, drawn, logprobs in play(engine, LENGTHS, forked=40).values():
        mask = torch.tensor([drawn])
        with torch.no_grad():
            expected = token_logprobs(model, torch.tensor([tokens]), mask)[mask]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_of_families(name: str) -> None:
    assert SAMPLE[name] in outcome(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - NOT_TINY.keys()))
def test_every_family_agrees_or_is_rejected_by_name(name: str) -> None:
    """Contract: log-probabilities of a ragged rollout of several turns, with forks of a shared prompt, equal those of the model's
    own forward pass, or the model is rejected in a message that names it, before it generates anything."""
    outcome(name)


@pytest.mark.parametrize("name", NOT_TINY)
def test_untested_families_do_not_fit(name: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 (each configuration fails in its own way)
        check_size(tiny_config(name))
