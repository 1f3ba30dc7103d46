"""A node's value from its own counts and its children's values, optionally mixed with a critic's ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.annotation import derived
from stages.annotation.selection import critic_ranks, mixed

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate


def backed_up(
    params: Annotate,
    reward: float,
    n: int,
    w: float,
    children: Sequence[tuple[int, float]],
    expanded: bool,
    to_come: float | None = None,
) -> float:
    """A node's value from its own counts and its children's (visits, value); children without visits are ignored.

    mean: W/N. max: the best child's value once the node is expanded, W/N before. children_mean (ReST-MCTS*, 2406.03816): the
    visit-weighted mean of the children, W/N before there are any. discounted_max (QLASS, 2502.02584): r + gamma * best child's
    value once expanded, r + gamma * their visit-weighted mean before; without children r + gamma * `to_come`, the value model's
    estimate of the rewards after this action (0 without one). The first three rules are in units of the episode's return, the
    last in units of the return from this action on.
    """
    visited = [(visits, value) for visits, value in children if visits]
    if params.backup == "discounted_max":
        if not visited:
            return reward if to_come is None else reward + params.gamma * to_come
        if expanded:
            return reward + params.gamma * max(value for _, value in visited)
        return reward + params.gamma * _weighted(visited)
    if params.backup == "max" and expanded and visited:
        return max(value for _, value in visited)
    if params.backup == "children_mean" and visited:
        return _weighted(visited)
    return w / n if n else 0.0


def _weighted(children: Sequence[tuple[int, float]]) -> float:
    return sum(visits * value for visits, value in children) / sum(visits for visits, _ in children)


def mix_critic(q: Sequence[float], priors: Sequence[float], values: Sequence[float | None], params: Annotate) -> list[float]:
    """Q of siblings mixed with the critic's 1/rank, in the tree's units; siblings without a model value rank last."""
    evaluation = params.evaluation
    criteria = priors if evaluation.critic == "prior" else [-math.inf if value is None else value for value in values]
    lowest = derived.lowest_value(params)
    scale = derived.highest_value(params) - lowest
    ranks = critic_ranks(criteria)
    return [mixed(own, lowest + scale * rank, evaluation.critic_share) for own, rank in zip(q, ranks, strict=True)]
