"""The contract of every scalar head: how a target becomes a loss and logits become a value."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ValueHead(Protocol):
    """`outputs` is the width of the last layer: 1 for mse, the number of bins for the categorical heads."""

    outputs: int

    def outside(self, target: Tensor) -> Tensor:
        """Which scalar targets [...] lie outside the head's support and are clamped, [...] bool; never with mse."""
        ...

    def encode(self, target: Tensor) -> Tensor:
        """Scalar targets [...] -> what the loss compares with: [...] for mse, [..., outputs] probabilities otherwise."""
        ...

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Per-element loss [...] of logits [..., outputs] against scalar targets [...]; no reduction."""
        ...

    def decode(self, logits: Tensor) -> Tensor:
        """Logits [..., outputs] -> scalar values [...]."""
        ...
