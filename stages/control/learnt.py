"""What learning a control problem leaves behind, for figures, learning curves and films."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

Act = Callable[[Tensor], Tensor]
"""Observations [N, S] -> actions [N, A] between -1 and 1, or numbers of actions [N, 1]."""


@dataclass(frozen=True)
class Learnt:
    figures: dict[str, float]
    steps: list[int] = field(default_factory=list)
    """Environment steps, or updates where nothing is played, before each evaluation."""
    returns: list[float] = field(default_factory=list)
    """Mean return of each evaluation."""
    act: Act | None = None
    """The policy that was evaluated."""
