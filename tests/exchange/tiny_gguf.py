"""A tiny random Gemma 3 as a GGUF file, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import make_tiny_gemma

CONTROL, NORMAL, BYTE = 3, 1, 6
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
PIECES = ["\n", "▁", *"abcdefghijklmnopqrstuvwxyz", "us", "er", "mo", "de", "el"]


def write_tokenizer(writer: Any, marks: list[str]) -> int:
    """The number of tokens."""
    from_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    special = [*SPECIAL[:4], *marks]
    tokens = [*special, *from_bytes, *PIECES]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (len(special) + 256) + [-float(place) for place in range(len(PIECES))])
    writer.add_token_types([CONTROL] * len(special) + [BYTE] * 256 + [NORMAL] * len(PIECES))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    return len(tokens)


def write_tiny(path: Path, marks: list[str], template: str = "") -> Any:
    """Write a tiny random Gemma 3 in float32, with a chat template or without; returns the model."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    writer = GGUFWriter(str(path), "gemma3")
    # query_pre_attn_scalar: what transformers assumes of GGUF files, which do not have it
    model = make_tiny_gemma(write_tokenizer(writer, marks), query_pre_attn_scalar=256, sliding_window=512, initializer_range=0.2)
    config = model.config
    if template:
        writer.add_chat_template(template)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(config.sliding_window)
    names = get_tensor_name_map(MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            kind = name.removesuffix(".weight")
            # llama.cpp adds the 1 of Gemma's (1 + w) norms to the weights.
            writer.add_tensor(f"{names.get_name(kind)}.weight", (tensor + ("norm" in kind)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
