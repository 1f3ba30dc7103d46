"""GGUF files become model folders: a tiny random Gemma 3, written with the gguf package."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.agent.chat import Chat
from stages.agent.policy import PolicyError, load_policy, policy_hash
from stages.exchange import __main__ as command
from stages.exchange.gguf import ACCEPT, PACKAGES, check_terms, packaged, write_gguf

CONTROL, NORMAL, BYTE = 3, 1, 6
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
PIECES = ["\n", "▁", *"abcdefghijklmnopqrstuvwxyz", "us", "er", "mo", "de", "el"]


def tiny_gemma(vocabulary: int) -> Any:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=256,  # what transformers assumes of GGUF files, which do not have it
        sliding_window=512,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return Gemma3ForCausalLM(config).eval()


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


def write_tiny(path: Path, marks: list[str]) -> Any:
    """Write a tiny random Gemma 3 in float32; returns the model."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    writer = GGUFWriter(str(path), "gemma3")
    model = tiny_gemma(write_tokenizer(writer, marks))
    config = model.config
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


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_tiny(path, ["<start_of_turn>", "<end_of_turn>"])


@pytest.fixture(scope="module")
def folder(file: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "tiny"
    write_gguf(file[0], target)
    return target


def test_folder_has_the_weights_and_records_their_hashes(file: tuple[Path, Any], folder: Path) -> None:
    """Contract: the policy loads like any other, and computes what the model that was written to GGUF computes."""
    import torch

    path, model = file
    policy = load_policy(folder)
    ids = torch.arange(2, 50)[None]
    with torch.no_grad():
        torch.testing.assert_close(policy.model(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    source = json.loads((folder / "source.json").read_text())
    assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source["policy_hash"] == policy.hash == policy_hash(folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_chat_template_has_the_tokenizers_own_turn_markers(folder: Path) -> None:
    policy = load_policy(folder)
    chat, tokenizer = Chat(policy.tokenizer), policy.tokenizer
    messages = [{"role": "user", "content": "user"}, {"role": "assistant", "content": "model"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nuser<end_of_turn>\n<start_of_turn>model\nmodel<end_of_turn>\n<start_of_turn>model\n"
    )
    assert chat.end_of_turn == SPECIAL.index("<end_of_turn>") == tokenizer.eos_token_id
    assert policy.model.config.eos_token_id == policy.model.generation_config.eos_token_id == chat.end_of_turn


def test_same_file_gives_the_same_bytes(file: tuple[Path, Any], folder: Path, tmp_path: Path) -> None:
    write_gguf(file[0], tmp_path / "again")
    files = [{path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, tmp_path / "again")]
    assert files[0] == files[1]


def test_refusals(file: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="already exists"):
        write_gguf(file[0], tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"not GGUF")
    with pytest.raises(PolicyError, match=r"bad\.gguf can't be read as GGUF"):
        write_gguf(tmp_path / "bad.gguf", tmp_path / "new")
    write_tiny(tmp_path / "plain.gguf", [])
    with pytest.raises(PolicyError, match="no turn markers; known are <start_of_turn> <end_of_turn>"):
        write_gguf(tmp_path / "plain.gguf", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_terms_are_shown_and_have_to_be_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: nothing of a package is used before its terms are accepted."""
    monkeypatch.delenv(ACCEPT, raising=False)
    module = SimpleNamespace(assemble=lambda path: path)
    monkeypatch.setitem(sys.modules, PACKAGES["gemma-270m"].module, module)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=f"to accept them, set {ACCEPT}=gemma-270m"):
        packaged("gemma-270m", tmp_path)
    assert "https://ai.google.dev/gemma/terms" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["exchange", "terms", "gemma-270m", "one-gpu"])
    assert command.main() == 2
    monkeypatch.setenv(ACCEPT, "other,gemma-270m")
    assert command.main() == 0
    assert packaged("gemma-270m", tmp_path) == tmp_path / "gemma-270m.gguf"
    monkeypatch.setitem(sys.modules, PACKAGES["gemma-270m"].module, None)
    with pytest.raises(PolicyError, match=r"pip install -e '\.\[gemma\]'"):
        packaged("gemma-270m", tmp_path)
    check_terms(["one-gpu"])
