"""GGUF files become model folders: a tiny random Gemma 3, written with the gguf package."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_gguf import SPECIAL, write_tiny

from stages.agent.chat import Chat
from stages.agent.policy import PolicyError, load_policy, policy_hash
from stages.exchange import __main__ as command
from stages.exchange.gguf import ACCEPT, PACKAGES, check_terms, packaged, write_gguf


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


def test_a_files_own_template_stays_and_its_turns_end_generation(tmp_path: Path) -> None:
    """Contract: other tools stop where a turn of an instruction-tuned model ends, though its end of sequence is another token."""
    template = (
        "{% for message in messages %}<start_of_turn>{{ message['content'] }}<end_of_turn>{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>{% endif %}"
    )
    write_tiny(tmp_path / "tuned.gguf", ["<start_of_turn>", "<end_of_turn>"], template)
    write_gguf(tmp_path / "tuned.gguf", tmp_path / "tuned")
    policy = load_policy(tmp_path / "tuned")
    assert (policy.tokenizer.chat_template, policy.tokenizer.eos_token) == (template, "<eos>")
    assert policy.model.config.eos_token_id == policy.model.generation_config.eos_token_id == [1, 5]
    assert Chat(policy.tokenizer).end_of_turn == 5
    write_tiny(tmp_path / "bad.gguf", [], "{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with pytest.raises(PolicyError, match=r"bad\.gguf: the chat template of"):
        write_gguf(tmp_path / "bad.gguf", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_same_file_gives_the_same_bytes(file: tuple[Path, Any], folder: Path, tmp_path: Path) -> None:
    write_gguf(file[0], tmp_path / "again")
    files = [{path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, tmp_path / "again")]
    assert files[0] == files[1]


def test_refusals(file: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="already exists"):
        write_gguf(file[0], tmp_path)
    with pytest.raises(PolicyError, match=r"none\.gguf does not exist; name a \.gguf file, or a package: gemma-270m"):
        write_gguf(tmp_path / "none.gguf", tmp_path / "new")
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
