"""Comparison of tensors with hand-computed numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def assert_near(found: torch.Tensor, expected: torch.Tensor | Sequence[Any] | float, atol: float = 1e-6) -> None:
    """Fail unless shapes agree and every number of `found` is within `atol` of `expected`."""
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=atol)
