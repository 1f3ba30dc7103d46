"""A merged tiny Gemma 3 opens in other tools: transformers, TRL, vLLM's loader by its names, and llama.cpp's converter."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from safetensors import safe_open
from tiny_gguf import write_tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM
from transformers.convert_slow_tokenizer import import_protobuf

from stages.agent.policy import load_policy
from stages.exchange.gguf import write_gguf
from stages.exchange.models import write_model
from stages.exchange.sentencepiece import BYTE, CONTROL, FILE, NORMAL, UNKNOWN, pieces, sentencepiece_model
from stages.merging.registry import bind
from stages.merging.streaming import merge_folders

pytest.importorskip("peft", reason="needs the extra `lora`: pip install 'bellwether[lora]'")
pytest.importorskip("gguf", reason="needs the extra `gguf`: pip install 'bellwether[gguf]'")
CONVERTER = "BELLWETHER_LLAMA_CPP"
"""Environment variable: a checkout of llama.cpp."""
CONVERSATION = [{"role": "user", "content": "user"}, {"role": "assistant", "content": "model"}]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two LoRA specialists of the model in a GGUF file, merged by RAM+."""
    root = tmp_path_factory.mktemp("gemma")
    write_tiny(root / "tiny.gguf", ["<start_of_turn>", "<end_of_turn>"])
    write_gguf(root / "tiny.gguf", root / "base")
    specialists = [make_adapter(root / name, root / "base", "base", seed) for seed, name in enumerate(("a", "b"))]
    merge_folders("ram_plus", specialists, root / "base", root / "merged", bind("ram_plus", (1.0, 1.0)), seed=0)
    return root / "merged"


@pytest.fixture(scope="module")
def exported(merged: Path) -> Path:
    write_model(merged, merged.with_name("exported"))
    return merged.with_name("exported")


def names(folder: Path) -> set[str]:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as handle:
        return set(handle.keys())


def test_it_has_the_configuration_and_names_that_loaders_expect(merged: Path) -> None:
    """Contract: transformers alone opens it. vLLM's loader of Gemma3ForCausalLM reads the same names, its tied output layer left
    out."""
    model, loading = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert isinstance(model, Gemma3ForCausalLM)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert names(merged) == names(merged.with_name("base")) == set(model.state_dict()) - {"lm_head.weight"}
    assert AutoConfig.from_pretrained(merged).architectures == ["Gemma3ForCausalLM"]
    ours = load_policy(merged).model
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, ours(ids).logits, atol=1e-4, rtol=1e-4)
        base = load_policy(merged.with_name("base")).model
        assert not torch.allclose(base(ids).logits, ours(ids).logits, atol=0.1)


def test_trl_trains_it(merged: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra `interop`: pip install 'bellwether[interop]'")
    from datasets import Dataset

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no"}
    trainer = trl.SFTTrainer(
        model=str(merged),
        args=trl.SFTConfig(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, **quiet),
        train_dataset=Dataset.from_list([{"messages": CONVERSATION}] * 2),
    )
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    rendered = AutoTokenizer.from_pretrained(merged).apply_chat_template(CONVERSATION, tokenize=False)
    (row, _) = trainer.train_dataset["input_ids"]
    assert row == load_policy(merged).tokenizer.encode(rendered, add_special_tokens=False)


def by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: of the neighbours that form a piece, those with the highest score become one, the leftmost first."""
    symbols = list(text.replace(" ", "\u2581"))
    while pairs := [(scores[both], -at) for at in range(len(symbols) - 1) if (both := symbols[at] + symbols[at + 1]) in scores]:
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return symbols


def test_exported_model_has_sentencepieces_file(merged: Path, exported: Path) -> None:
    """Contract: llama.cpp's converter reads a tokenizer of this kind from tokenizer.model; by its scores, a text becomes the same
    pieces as by tokenizer.json."""
    assert {path.name for path in exported.iterdir()} == {path.name for path in merged.iterdir()} | {FILE}
    proto: Any = import_protobuf().ModelProto()
    proto.ParseFromString((exported / FILE).read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(exported)
    vocabulary = tokenizer.get_vocab()
    assert [piece.piece for piece in proto.pieces] == sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {piece.piece: piece.type for piece in proto.pieces}
    assert [kinds[text] for text in ("<unk>", "<end_of_turn>", "<0x0A>", "us")] == [UNKNOWN, CONTROL, BYTE, NORMAL]
    assert proto.trainer_spec.byte_fallback
    assert not proto.normalizer_spec.add_dummy_prefix
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(draw.choices("usermodl ", k=12))
        assert by_scores(text, scores) == tokenizer.tokenize(text), text


def test_other_tokenizers_get_no_such_file(tiny_policy: Path, merged: Path) -> None:
    """Contract: nor does one without a token for what is unknown, which SentencePiece needs."""
    assert sentencepiece_model(json.loads((tiny_policy / "tokenizer.json").read_text())) is None
    known = json.loads((merged / "tokenizer.json").read_text())
    assert sentencepiece_model(known) is not None
    assert sentencepiece_model({**known, "model": {**known["model"], "unk_token": None}}) is None


def test_scores_are_places_of_first_merges() -> None:
    """Computed by hand: ab before abc; abc has two merges, of which the first counts; d has none and comes last."""
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "vocab": {"<unk>": 0, "<0x41>": 1, "a": 2, "b": 3, "c": 4, "bc": 5, "ab": 6, "abc": 7, "d": 9},
        "merges": [["a", "b"], ["ab", "c"], "b c", ["a", "bc"]],
    }
    added = [{"id": 10, "content": "\n\n", "special": False}, {"id": 11, "content": "<end>", "special": True}]
    kinds = {text: (score, kind) for text, score, kind in pieces({"model": model, "added_tokens": added})}
    assert kinds["ab"] == (0.0, NORMAL)
    assert kinds["abc"] == (-1.0, NORMAL)
    assert kinds["bc"] == (-2.0, NORMAL)
    assert kinds["d"] == kinds["a"] == (-3.0, NORMAL)
    assert (kinds["<unk>"][1], kinds["<0x41>"][1], kinds["<end>"][1]) == (UNKNOWN, BYTE, CONTROL)
    assert [text for text, _, _ in pieces({"model": model, "added_tokens": added})][8:] == ["[PAD8]", "d", "\n\n", "<end>"]


@pytest.mark.skipif(
    not os.environ.get(CONVERTER) or importlib.util.find_spec("sentencepiece") is None,
    reason=f"needs a checkout of llama.cpp, named by {CONVERTER}, and sentencepiece",
)
def test_llama_cpp_converts_it_back(exported: Path, tmp_path: Path) -> None:
    """Contract: what llama.cpp's own converter writes is the same model with the same tokens."""
    script = Path(os.environ[CONVERTER]) / "convert_hf_to_gguf.py"
    arguments = [str(exported), "--outfile", str(tmp_path / "back.gguf"), "--outtype", "f32"]
    subprocess.run([sys.executable, str(script), *arguments], check=True, capture_output=True)
    write_gguf(tmp_path / "back.gguf", tmp_path / "back")
    ours, back = load_policy(exported), load_policy(tmp_path / "back")
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(back.model(ids).logits, ours.model(ids).logits, atol=1e-4, rtol=1e-4)
    assert back.tokenizer.encode("user model\n\n") == ours.tokenizer.encode("user model\n\n")
