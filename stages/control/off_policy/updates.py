"""What updates of every agent of lane control have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of the optimiser on `loss`, a number."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """Move the slow copy's parameters towards those of `fast` by this share of the way."""
    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), rate)
