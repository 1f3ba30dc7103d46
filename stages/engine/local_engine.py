"""The engine of a model in this process: the torch engine, or the model engine for models that its cache does not fit."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from stages.engine.architectures import unserved, unslotted
from stages.engine.model_engine import ModelEngine
from stages.engine.self_check import model_name
from stages.engine.torch_engine import TorchEngine

LocalEngine = TorchEngine | ModelEngine
"""Engines over a model in this process, which also return hidden states (`read`)."""


def make_engine(model: Any, end_of_turn: Iterable[int], slots: int, max_length: int) -> LocalEngine:
    """The engine for `model`; see `TorchEngine` and `ModelEngine`. Raises ValueError if neither supports it."""
    if reason := unserved(model.config, max_length):
        raise ValueError(reason)
    reason = unslotted(model.config)
    if reason is None:
        try:
            return TorchEngine(model, end_of_turn, slots, max_length)
        except ValueError as error:
            reason = str(error)
    engine = ModelEngine(model, end_of_turn, max_length)
    print(
        f"engine: {model_name(model)} runs by its own forward pass, one session at a time, since the torch engine does not "
        f"support it ({reason})",
        file=sys.stderr,
        flush=True,
    )
    return engine
