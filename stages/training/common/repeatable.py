"""Backward passes on a GPU that give the same bits each time."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NOT_REPEATABLE = "(?s).*deterministic"
"""PyTorch's warnings about operations that are not repeatable on a GPU."""


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """On a GPU, add gradients in a fixed order where PyTorch can; elsewhere they are always. Forward passes need nothing: they
    scatter to distinct places."""
    if device == "cpu":
        yield
        return
    filling: Any = importlib.import_module("torch.utils.deterministic")
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NOT_REPEATABLE)
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        filling.fill_uninitialized_memory = fills
