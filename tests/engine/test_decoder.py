"""The engine's own forward pass equals the Hugging Face model for each supported family; replay of recorded passes."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from stages.agent.logprobs import token_logprobs
from stages.agent.settings import Lora
from stages.engine.cache import SlotCache
from stages.engine.cuda_graphs import GraphedForward, make_forward
from stages.engine.decoder import LeanForward, serves
from stages.engine.engine import Sampling
from stages.engine.forward import StockForward
from stages.engine.torch_engine import TorchEngine
from stages.training.common.adapters import adapted, add_adapters

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0}
THETAS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMA3 = {
    **SHAPE,
    "pad_token_id": 0,
    "head_dim": 16,
    "query_pre_attn_scalar": 48,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": THETAS,
}
"""Its window is shorter than the sessions of `play`; its layers differ in rotary base."""
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama 3": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={**LLAMA3, "original_max_position_embeddings": 32}),
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, pad_token_id=0, no_rope_layers=[1, 0, 1])),
    "smollm3 with windows": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**SHAPE, pad_token_id=0, no_rope_layers=[1, 0, 0], use_sliding_window=True, sliding_window=24)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3)),
    "gemma3 with scaled positions": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **GEMMA3
            | {"rope_parameters": {**THETAS, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}
        )
    ),
}


def randomised(family: str) -> torch.nn.Module:
    """A model with random norms and biases, so that leaving one out changes the output."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
    return model.to(DEVICE)


def play(engine: TorchEngine, lengths: tuple[int, ...] = (3, 40, 9, 17, 1)) -> list[tuple[list[int], list[float]]]:
    """Two turns of sessions with prompts of unequal length and an observation in between: (all tokens, the last turn's
    log-probs)."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 61, (length,), generator=generator).tolist() for length in lengths]
    sessions = [engine.open(text) for text in texts]
    logprobs: dict[int, list[float]] = {}
    for turn in range(2):
        for index, session in enumerate(sessions):
            if turn:
                engine.extend(session, texts[index][:5])
                texts[index] += texts[index][:5]
            engine.request(session, 10 * index + turn, Sampling(max_tokens=6))
        left = set(sessions)
        while left:
            for done in engine.advance():
                left.remove(done.session)
                texts[sessions.index(done.session)] += done.token_ids
                logprobs[done.session] = list(done.logprobs)
    engine.reset()
    return [(text, logprobs[session]) for text, session in zip(texts, sessions, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_the_models_for_every_family(family):
    model = randomised(family)
    assert serves(model)
    for tokens, logprobs in play(TorchEngine(model, [], slots=4, max_length=96)):
        ids, mask = torch.tensor([tokens], device=DEVICE), torch.zeros(1, len(tokens), dtype=torch.bool, device=DEVICE)
        mask[0, -len(logprobs) :] = True
        with torch.no_grad():
            expected = token_logprobs(model, ids, mask)[mask].cpu()
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "smollm3 with windows", "gemma3"])
def test_lean_and_stock_forward_give_same_tokens(family, monkeypatch):
    """Contract: unsupported architectures run through the model itself, with the same tokens."""
    model = randomised(family)
    lean = play(TorchEngine(model, [], slots=4, max_length=96))
    monkeypatch.setattr("stages.engine.cuda_graphs.serves", lambda model: False)
    engine = TorchEngine(model, [], slots=4, max_length=96)
    assert isinstance(engine._layers, StockForward)
    stock = play(engine)
    assert [tokens for tokens, _ in lean] == [tokens for tokens, _ in stock]
    for (_, found), (_, expected) in zip(lean, stock, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)


def cache_for(model: torch.nn.Module) -> SlotCache:
    return SlotCache(3, 4, 2, 96, 12, torch.float32, torch.device("cpu"))


def test_unsupported_models_use_stock_forward():
    model = randomised("llama").cpu()
    assert isinstance(make_forward(model, cache_for(model)), LeanForward)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert isinstance(make_forward(model, cache_for(model)), StockForward)
    dynamic = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    assert not serves(LlamaForCausalLM(dynamic))
    assert not serves(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)))
    assert not serves(Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3, attn_logit_softcapping=20.0)))
    scaled = {**THETAS, "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    assert not serves(Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3 | {"rope_parameters": scaled})))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_changed_weights_apply_after_sessions_close(family):
    model = randomised(family)
    engine = TorchEngine(model, [], slots=4, max_length=96)
    play(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert play(engine) == play(TorchEngine(model, [], slots=4, max_length=96))


def with_adapters(family: str, targets: str | list[str]) -> torch.nn.Module:
    """A model of the family whose adapters change its outputs."""
    model = randomised(family).cpu()
    add_adapters(model, Lora(rank=4, alpha=6, targets=targets), 0)
    with torch.no_grad():
        for _, layer in adapted(model):
            layer.lora_B["default"].weight.normal_(0, 0.2)
    return model.to(DEVICE)


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "up_proj"], ["q_proj", "o_proj", "down_proj"]])
@pytest.mark.parametrize("family", ["llama with biases", "gemma3"])
def test_adapters_run_in_the_specialised_pass(family, targets):
    """Contract: log-probs are those of peft's layers, also after a training step has changed the factors."""
    model = with_adapters(family, targets)
    engine = TorchEngine(model, [], slots=4, max_length=96)
    assert isinstance(make_forward(model, engine.cache), LeanForward | GraphedForward)
    for _ in range(2):
        for tokens, logprobs in play(engine):
            ids, mask = torch.tensor([tokens], device=DEVICE), torch.zeros(1, len(tokens), dtype=torch.bool, device=DEVICE)
            mask[0, -len(logprobs) :] = True
            with torch.no_grad():
                expected = token_logprobs(model, ids, mask)[mask].cpu()
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)
        with torch.no_grad():
            for _, layer in adapted(model):
                layer.lora_A["default"].weight.mul_(1.3)


def test_adapters_that_are_not_plain_run_through_the_model():
    model = with_adapters("gemma3", "all-linear")
    assert serves(model)
    _, layer = adapted(model)[0]
    layer.enable_adapters(False)
    assert not serves(model)
    layer.enable_adapters(True)
    layer.lora_dropout["default"] = torch.nn.Dropout(0.1)
    assert not serves(model)


@pytest.mark.parametrize("family", ["smollm3 with windows", "gemma3"])
def test_families_run_in_bfloat16(family):
    """Contract: in bfloat16, too, the engine's self-check at creation finds the model's own hidden states."""
    model = randomised(family).bfloat16()
    assert serves(model)
    assert all(logprobs for _, logprobs in play(TorchEngine(model, [], slots=4, max_length=96)))


def test_recorded_passes_replay_with_new_tokens():
    """Contract: a pass is recorded once per shape, keeps its tensors in place, and its replay equals the pass itself.

    `record` runs the function again at each replay, into the same tensor, as a CUDA graph does."""
    model = randomised("qwen2")
    recordings = []

    def record(function):
        result = function().clone()
        recordings.append(result)
        return (lambda: result.copy_(function())), result

    plain = TorchEngine(model, [], slots=4, max_length=96)
    graphed = TorchEngine(model, [], slots=4, max_length=96)
    graphed._layers = GraphedForward(graphed._layers, record)
    assert play(graphed) == play(plain)
    first = len(recordings)
    assert 0 < first <= 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert play(graphed) == play(plain)
    assert len(recordings) == first
