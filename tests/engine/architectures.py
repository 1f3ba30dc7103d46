"""Tiny random models of many architectures, made from their configurations; sliding windows span `WINDOW` positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

WINDOW = 24
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOCAL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * place for place in range(8)],
    "long_factor": [2.0 + place for place in range(8)],
    "original_max_position_embeddings": 200,
}
THETAS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, sliding_window=WINDOW)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, **EXPERTS, sliding_window=WINDOW)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SHAPE, sliding_window=WINDOW)),
    "phi3 longrope": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**SHAPE, sliding_window=WINDOW, original_max_position_embeddings=200, rope_parameters=LONG)
    ),
    "starcoder2": lambda: hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**SHAPE, sliding_window=WINDOW)),
    "gpt_neo": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            **SMALL, hidden_size=64, num_layers=3, num_heads=4, attention_types=[[["local", "global", "local"], 1]],
            window_size=WINDOW, max_position_embeddings=512,
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL, n_embd=64, n_layer=3, n_head=4, n_positions=512)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SHAPE, **LOCAL, head_dim=16, final_logit_softcapping=None, attn_logit_softcapping=2.0)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SHAPE, **LOCAL, head_dim=16, query_pre_attn_scalar=16, rope_parameters=THETAS)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE, **LOCAL, use_sliding_window=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, **LOCAL, head_dim=16, use_sliding_window=True)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(
        hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 0], use_sliding_window=True, sliding_window=WINDOW)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **SHAPE, **LOCAL, **EXPERTS, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
        )
    ),
    "olmo3": lambda: hf.Olmo3ForCausalLM(hf.Olmo3Config(**SHAPE, **LOCAL)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**{name: SHAPE[name] for name in SHAPE if name != "num_key_value_heads"})
    ),
}  # fmt: skip


def make(name: str) -> Any:
    """A model with non-uniform attention, norms and biases, so that leaving one out changes the output."""
    torch.manual_seed(0)
    model = MAKERS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in key and "wte" not in key:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model
