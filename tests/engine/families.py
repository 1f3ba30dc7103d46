"""Tiny random models of every causal family of transformers, and the engine that runs each: `python tests/engine/families.py`
prints the table in docs/families.md, `--write` writes it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from architectures import randomised
from playing import play
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from stages.agent.logprobs import token_logprobs
from stages.agent.policy import check_head
from stages.agent.shared_prefixes import fastest_states
from stages.engine.architectures import unserved
from stages.engine.decoder import LEAN
from stages.engine.local_engine import LocalEngine, make_engine
from stages.engine.model_engine import ModelEngine
from stages.training.common.batches import padded

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
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
LATENT = {
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "num_key_value_heads": 4,
}
"""Of families whose cache is compressed."""
ROPES = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")}
TINY_FOR: dict[str, dict[str, Any]] = {
    "axk1": {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "mlp_layer_types": ["dense", "sparse"]},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 64,
        **{
            f"{part}_config": {
                "hidden_size": 64,
                "hidden_size_global": 64,
                "intermediate_size": 80,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
            }
            for part in ("patcher", "encoder", "decoder", "global")
        },
    },
    "cohere_compass_text": {"rope_parameters": ROPES},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 80, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "doge": {"sliding_window": None},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "head_dim": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": None,
        "mlp_layer_types": ["dense", "sparse"],
        "n_routed_experts": 4,
        "shared_experts_intermediate_size": 32,
        "index_topk": 16,
        "index_head_dim": 16,
        "index_n_heads": 4,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [80] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 0,
            "hidden_size_per_layer_input": 0,
            "per_layer_config": None,
        }
    },
    "gemma4_text": {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8, "per_layer_config": None},
    "gpt_neo": {"attention_types": [[["local", "global"], 1]], "num_layers": 2, "window_size": 24},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 80,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 48],
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 8,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    "roc_bert": {"pronunciation_vocab_size": 61, "shape_vocab_size": 61},
    "xlnet": {"d_inner": 80, "d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 8,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further values that some families need."""
MOST = 5_000_000
"""Parameters of a model that counts as tiny."""


def tiny_config(name: str) -> Any:
    """The configuration of `name` with the values of TINY that it knows."""
    config, own = CONFIGS[name], TINY_FOR.get(name, {})
    known = vars(config(**({"text_config": own["text_config"]} if "text_config" in own else {})))
    attributes = getattr(config, "attribute_map", {})
    values = {key: value for key, value in TINY.items() if attributes.get(key, key) in known}
    kinds = list(dict.fromkeys(known.get("layer_types") or ()))
    if len(kinds) > 1:
        values["layer_types"] = [kinds[0], kinds[-1]]
    if "qk_rope_head_dim" in known:
        values |= {key: value for key, value in LATENT.items() if key in known}
    return config(**values | own)


def check_size(config: Any) -> None:
    """Raise ValueError for a configuration of a large model, or what transformers raises for one that makes no model."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"{size:,} parameters")


LEAN_PASS = "specialised forward pass"
SLOTS = "own layers over the shared cache"
OWN = {
    256: "own forward pass and cache",
    1: "own forward pass and cache, observations token by token",
    0: "own forward pass, without a cache",
}
"""By `Way.chunk`."""
ROUNDING = 1e-4
"""Of log-probabilities in float32, which processors sum in orders of their own: up to 3.2e-5 (mamba). Another token one to
eighteen places before changes them by 0.006 (cohere) to 0.96 (mamba), in the median."""
RUNS = (LEAN_PASS, SLOTS, *OWN.values())
"""How the engines run a model, the fastest first."""


def outcome(name: str) -> str:
    """One of `RUNS`, after a comparison of log-probabilities, or why no engine runs the model."""
    config = tiny_config(name)
    if reason := unserved(config, MAX_LENGTH):
        assert name in reason
        return reason
    check_size(config)
    torch.manual_seed(0)
    model = randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    try:
        engine = make_engine(model, [], slots=4, max_length=MAX_LENGTH)
        check_head(model, Path(name))
    except ValueError as error:
        if type(model).__name__ not in str(error):
            raise
        return str(error)
    check_logprobs(engine, model)
    if isinstance(engine, ModelEngine):
        return OWN[engine.way.chunk]
    return LEAN_PASS if name in LEAN else SLOTS


def check_logprobs(engine: LocalEngine, model: Any) -> None:
    """Assert that the log-probabilities of a ragged rollout of several turns, with forks of a shared prompt, are those of
    training, also where it reads common prefixes once, and of the model's own logits."""
    played = list(play(engine, LENGTHS, forked=40).values())
    every = []
    for tokens, drawn, logprobs in played:
        mask, ids = torch.tensor([drawn]), torch.tensor([tokens])
        with torch.no_grad():
            trained = token_logprobs(model, ids, mask)[mask]
            logs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        own = logs[0, :-1].gather(-1, ids[0, 1:, None])[:, 0][mask[0, 1:]]
        torch.testing.assert_close(torch.tensor(logprobs), trained, atol=ROUNDING, rtol=0)
        torch.testing.assert_close(trained, own, atol=ROUNDING, rtol=0)
        every.append(trained)
    ids = padded([tokens for tokens, _, _ in played], 0, torch.int64)
    mask = padded([drawn for _, drawn, _ in played], 0, torch.bool)
    with torch.no_grad():
        together = token_logprobs(model, ids, mask, states=fastest_states(model))[mask]
    torch.testing.assert_close(together, torch.cat(every), atol=ROUNDING, rtol=0)


REASONS = {
    "has an encoder": "an encoder",
    "is multimodal": "multimodal",
    "the pass fails": "its forward pass can't be continued token by token",
    "token by token": "not causal: its states change with later tokens",
    "bidirectional": "not causal: its states change with later tokens",
    "transforms its logits": "it transforms its logits in a way that stages/engine/head.py does not know",
    "has no attribute 'last_hidden_state'": "transformers does not say which part of it computes hidden states",
}
"""Parts of refusals, with what the table says."""


def table() -> Iterator[str]:
    """The lines of docs/families.md."""
    found: dict[str, list[str]] = {}
    for name in sorted(CONFIGS):
        result = outcome(name)
        if result not in RUNS:
            result = next(f"refused: {said}" for part, said in REASONS.items() if part in result)
        found.setdefault(result, []).append(name)
        print(f"{name}: {result}", file=sys.stderr, flush=True)
    yield "| how | families | `model_type` |"
    yield "|---|---:|---|"
    for result in (*RUNS, *sorted(found.keys() - set(RUNS))):
        names = found.get(result, [])
        yield f"| {result} | {len(names)} | {', '.join(names)} |"


BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table to docs/families.md")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    lines = "\n".join(table())
    if not write:
        print(lines)
        return
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
