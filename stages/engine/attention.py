"""Selects transformers' attention implementation."""

from __future__ import annotations

from typing import Any


def use_attention(model: Any, name: str) -> None:
    """Set `model`'s attention to `name` ("eager", "sdpa"), or to eager if its architecture has no sdpa (GPT-Neo, gpt-oss,
    Gemma 2)."""
    model.set_attn_implementation(name if name != "sdpa" or model._supports_sdpa else "eager")
