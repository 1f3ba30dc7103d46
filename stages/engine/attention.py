"""Which of transformers' implementations of attention a model is trained and read with."""

from __future__ import annotations

from typing import Any


def use_attention(model: Any, name: str) -> None:
    """Let `model` attend by `name` ("eager", "sdpa"); eagerly where transformers has no sdpa for its architecture (GPT-Neo,
    gpt-oss, Gemma 2)."""
    model.set_attn_implementation(name if name != "sdpa" or model._supports_sdpa else "eager")
