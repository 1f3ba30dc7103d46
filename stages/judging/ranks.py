"""Rewards from an order of finish, in [0, 1]. Pure functions; the advantage is `rl.advantage`'s (group mean and std)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.judging.measures import TIE


def min_rank_rewards(scores: Sequence[float]) -> tuple[float, ...]:
    """r_i = (Rmax - R_i) / (Rmax - 1), R_i = 1 + the number of higher scores; 0 for all if all scores are equal."""
    ranks = [1 + sum(other > score + TIE for other in scores) for score in scores]
    worst = max(ranks)
    return tuple((worst - rank) / (worst - 1) if worst > 1 else 0.0 for rank in ranks)


def quantile_rewards(order: Sequence[int], tied: Sequence[set[int]] = ()) -> tuple[float, ...]:
    """r = 1 - k / (N - 1) at place k of `order`, best first; members of a set in `tied` share the mean of theirs. By number of
    the entrant. Raises ValueError for fewer than two entrants."""
    if len(order) < 2:
        raise ValueError("a ranking needs at least two entrants; set rl.group_size to 2 or more")
    rewards = [0.0] * len(order)
    for place, entrant in enumerate(order):
        rewards[entrant] = 1.0 - place / (len(order) - 1)
    for members in tied:
        mean = sum(rewards[entrant] for entrant in sorted(members)) / len(members)
        for entrant in members:
            rewards[entrant] = mean
    return tuple(rewards)


def shared_quantiles(keys: Sequence[Any]) -> tuple[float, ...]:
    """`quantile_rewards` of entrants ordered by `keys`, highest first, where equal keys share."""
    order = sorted(range(len(keys)), key=lambda entrant: keys[entrant], reverse=True)
    tied = [{entrant for entrant in order if keys[entrant] == key} for key in dict.fromkeys(keys)]
    return quantile_rewards(order, tied)


def joined(pairs: Sequence[tuple[int, int]]) -> list[set[int]]:
    """The connected groups of entrants that `pairs` tie to each other."""
    groups: list[set[int]] = []
    for pair in pairs:
        touching = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touching] + [set(pair).union(*touching)]
    return groups
