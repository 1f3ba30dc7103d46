"""The contract of scalar heads: targets to losses, logits to values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ValueHead(Protocol):
    """`outputs`: width of the last layer, 1 for mse, the number of bins for categorical heads."""

    outputs: int

    def outside(self, target: Tensor) -> Tensor:
        """Which scalar targets [...] are outside the head's support and get clamped, [...] bool; none with mse."""
        ...

    def encode(self, target: Tensor) -> Tensor:
        """Scalar targets [...] -> the loss's targets: [...] for mse, [..., outputs] probabilities otherwise."""
        ...

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Per-element loss [...] of logits [..., outputs] against scalar targets [...]; no reduction."""
        ...

    def decode(self, logits: Tensor) -> Tensor:
        """Logits [..., outputs] -> scalar values [...]."""
        ...
