"""Shapley and Banzhaf values of large teams or noisy games from samples of coalitions.

After Heuillet et al., arXiv 2110.01307. `by_permutations` estimates Shapley values; `by_coalitions` is the estimator of the
paper's code, which draws coalitions uniformly and thus estimates Banzhaf values: the two differ from three players on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stages.control.exact.shapley import CoalitionError, player_count
from stages.seeding import key64

Array = NDArray[np.float64]
Game = Callable[[int, int], float]
"""(coalition as bits, number of the sample) -> its value. Coalitions of one sample should share their random draws."""


@dataclass(frozen=True)
class Estimate:
    samples: Array
    """[M, n]: the players' gains in every sample; with antithetic pairs, means of two."""
    evaluations: int
    """Coalitions that were evaluated."""
    gap: float
    """How far the values' sum is from the mean of v(all) - v(none); nan if these were not evaluated."""

    @property
    def values(self) -> Array:
        """[n]."""
        return self.samples.mean(0)

    @property
    def errors(self) -> Array:
        """Standard errors [n]; nan for one sample."""
        if len(self.samples) == 1:
            return np.full(self.samples.shape[1], np.nan)
        return self.samples.std(0, ddof=1) / np.sqrt(len(self.samples))


@dataclass
class Counted:
    """A game that counts evaluations. cached: the value does not depend on the sample, and each coalition is evaluated once."""

    game: Game
    cached: bool = False
    evaluations: int = 0
    known: dict[int, float] = field(default_factory=dict)

    def __call__(self, coalition: int, sample: int) -> float:
        if self.cached and coalition in self.known:
            return self.known[coalition]
        self.evaluations += 1
        found = self.game(coalition, sample)
        if not np.isfinite(found):
            raise CoalitionError(f"the value of coalition {coalition:b} is {found}, not a finite number; evaluate it again")
        if self.cached:
            self.known[coalition] = found
        return found


def banzhaf(values: Array) -> Array:
    """Banzhaf values [n, ...] of a table of coalitions [2^n, ...]: the mean gain over all coalitions without the player. They do
    not sum to v(all) - v(none). Raises CoalitionError."""
    every = np.arange(len(values))
    without = [every[every >> player & 1 == 0] for player in range(player_count(values))]
    return np.stack([(values[rest | 1 << player] - values[rest]).mean(0) for player, rest in enumerate(without)])


def by_permutations(
    game: Game, players: int, samples: int, key: tuple[object, ...], antithetic: bool = False, cached: bool = False
) -> Estimate:
    """Shapley values from random orders in which the players join; antithetic: each order is also walked in reverse, on the same
    draws. (players + 1) evaluations per walk, unless cached. Raises CoalitionError for a value that is not finite."""
    counted, rng = Counted(game, cached), np.random.default_rng(key64(*key, "permutations"))
    gains, totals = np.zeros((samples, players)), np.zeros(samples)
    for sample in range(samples):
        order = rng.permutation(players)
        walks = (order, order[::-1]) if antithetic else (order,)
        for walk in walks:
            found, whole = _walk(counted, walk, sample)
            gains[sample] += found / len(walks)
            totals[sample] += whole / len(walks)
    return Estimate(gains, counted.evaluations, abs(float(gains.sum(1).mean() - totals.mean())))


def _walk(game: Counted, order: NDArray[np.int64], sample: int) -> tuple[Array, float]:
    """Each player's gain [n] when it joins those before it, and what all gain together."""
    gains, coalition = np.zeros(len(order)), 0
    first = before = game(0, sample)
    for player in order.tolist():
        coalition |= 1 << player
        after = game(coalition, sample)
        gains[player], before = after - before, after
    return gains, before - first


def by_coalitions(game: Game, players: int, samples: int, key: tuple[object, ...], cached: bool = False) -> Estimate:
    """Banzhaf values from uniformly drawn coalitions: two evaluations per player and sample, unless cached. Raises CoalitionError
    for a value that is not finite."""
    counted, rng = Counted(game, cached), np.random.default_rng(key64(*key, "coalitions"))
    gains = np.zeros((samples, players))
    for sample in range(samples):
        members = rng.integers(2, size=(players, players)) @ (1 << np.arange(players))
        for player, drawn in enumerate(members.tolist()):
            bit = 1 << player
            gains[sample, player] = counted(drawn | bit, sample) - counted(drawn & ~bit, sample)
    return Estimate(gains, counted.evaluations, float("nan"))
