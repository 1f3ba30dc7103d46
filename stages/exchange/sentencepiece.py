"""SentencePiece's file `tokenizer.model`, made from a tokenizer.json that holds the same tokenizer.

transformers saves tokenizers of this kind (Gemma, Llama 2, Mistral) as tokenizer.json alone, while llama.cpp's converter to GGUF
reads their pieces with scores from tokenizer.model. SentencePiece merges the neighbours whose piece scores highest, and
tokenizer.json those that come first in its list of merges: so a piece's score here is minus the place of its first merge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_bytes

FILE = "tokenizer.model"
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces, as SentencePiece numbers them."""
BPE = 2
_BYTE = re.compile("<0x[0-9A-F]{2}>")


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer and those that it consists of."""
    if isinstance(value, Mapping):
        yield value
        for part in (*(value.get("normalizers") or ()), *(value.get("pretokenizers") or ())):
            yield from _parts(part)


def _spaces(settings: Mapping[str, Any]) -> bool | None:
    """Whether the tokenizer puts a space before a text; None if it does not write spaces as SentencePiece does."""
    parts = [*_parts(settings.get("normalizer")), *_parts(settings.get("pre_tokenizer"))]
    spaces = [part for part in parts if part["type"] == "Metaspace"]
    if any(part.get("prepend_scheme", "always") != "never" for part in spaces):
        return True
    if not spaces and not any(part["type"] == "Replace" and part.get("content") == SPACE for part in parts):
        return None
    return any(part["type"] == "Prepend" and part.get("prepend") == SPACE for part in parts)


def pieces(settings: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """(text, score, type) of every token id from 0 on, for the contents of a tokenizer.json with BPE and byte fallback."""
    model = settings["model"]
    texts = {number: text for text, number in model["vocab"].items()}
    added = {token["id"]: token for token in settings.get("added_tokens") or ()}
    texts |= {number: token["content"] for number, token in added.items()}
    merged: dict[str, float] = {}
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merged.setdefault(left + right, -float(len(merged)))
    found = []
    for number in range(max(texts) + 1):
        text = texts.get(number, f"[PAD{number}]")
        score = merged.get(text, -float(len(merged)))
        if text == model.get("unk_token"):
            kind, score = UNKNOWN, 0.0
        elif number in added:
            kind, score = (CONTROL if added[number].get("special") else USER_DEFINED), 0.0
        elif _BYTE.fullmatch(text):
            kind, score = BYTE, 0.0
        else:
            kind = NORMAL if number in texts else UNUSED
        found.append((text, score, kind))
    return found


def sentencepiece_model(settings: Mapping[str, Any]) -> bytes | None:
    """The bytes of `tokenizer.model` for the contents of a tokenizer.json; None if that is no tokenizer of SentencePiece's kind:
    BPE with byte fallback and a token for what is unknown, and spaces written as `SPACE`."""
    model, spaces = settings["model"], _spaces(settings)
    if model.get("type") != "BPE" or not model.get("byte_fallback") or spaces is None:
        return None
    if model.get("unk_token") not in model["vocab"]:
        return None
    from transformers.convert_slow_tokenizer import import_protobuf

    proto: Any = import_protobuf().ModelProto()
    for text, score, kind in pieces(settings):
        piece = proto.pieces.add()
        piece.piece, piece.score, piece.type = text, score, kind
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = BPE, len(proto.pieces), True
    trainer.unk_piece, trainer.unk_id = model["unk_token"], model["vocab"][model["unk_token"]]
    normalizer.name, normalizer.precompiled_charsmap = "identity", b""
    normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = spaces, False, True
    return proto.SerializeToString(deterministic=True)


def add_sentencepiece(folder: Path) -> None:
    """Write `tokenizer.model` into a model folder that has a tokenizer.json of this kind without it."""
    source = folder / "tokenizer.json"
    if (folder / FILE).exists() or not source.exists():
        return
    content = sentencepiece_model(json.loads(source.read_text(encoding="utf-8")))
    if content is not None:
        atomic_bytes(folder / FILE, content)
