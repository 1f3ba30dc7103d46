"""Where episodes of MuJoCo's tasks end, as functions of the next observation, so that a model's rollouts can end there too.

The rules are those of Gymnasium's Hopper, Walker2d and HalfCheetah, which RAVL's reference code has as well (arXiv 2402.12527).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Ends = Callable[[Tensor], Tensor]
"""Next observations [B, S] -> whether the episode is over there, [B]."""


def hopper(state: Tensor) -> Tensor:
    """Unless it is finite, higher than 0.7, upright within 0.2 and all else below 100 in size."""
    upright = (state[:, 0] > 0.7) & (state[:, 1].abs() < 0.2)
    return ~(state.isfinite().all(-1) & (state[:, 2:].abs() < 100.0).all(-1) & upright)


def walker(state: Tensor) -> Tensor:
    """Unless it is between 0.8 and 2.0 high and upright within 1."""
    return ~((state[:, 0] > 0.8) & (state[:, 0] < 2.0) & (state[:, 1].abs() < 1.0))


def never(state: Tensor) -> Tensor:
    """Only by the time limit."""
    return state.new_zeros(len(state)).bool()


RULES: dict[str, Ends] = {"Hopper": hopper, "Walker2d": walker, "HalfCheetah": never}
"""By a task's name without its version."""


def ends_of(task: str) -> Ends | None:
    """The rule of a task; None if there is none here."""
    return RULES.get(task.rpartition("-v")[0])
