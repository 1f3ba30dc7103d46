"""What fictitious play learns, against an exhaustive search: exploitability falls in zero-sum and potential games, and play ends
at equilibria of a grid of all profiles, whose utilities are written out here."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from stages.control.games.risk_averse import exploitability, fictitious_play
from stages.control.games.settings import RiskAversion

PENNIES = np.array([[1.0, -1.0], [-1.0, 1.0]])
UNEVEN = np.array([[2.0, -1.0], [-1.0, 1.0]])
ROCK_PAPER_SCISSORS = np.array([[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
POTENTIAL = np.array([[3.0, 1.0], [0.0, 2.0]])
CONGESTION = np.array([[-2.0, -1.0], [-1.0, -3.0]])
GAMES = {
    "pennies": [PENNIES, -PENNIES],
    "uneven": [UNEVEN, -UNEVEN],
    "rock_paper_scissors": [ROCK_PAPER_SCISSORS, -ROCK_PAPER_SCISSORS],
    # each player's payoff is the potential and a term of the other's action alone
    "potential": [POTENTIAL + np.array([[0.5, -1.0]]), POTENTIAL + np.array([[2.0], [-0.5]])],
    "congestion": [CONGESTION, CONGESTION],
    "stag_hunt": [np.array([[4.0, 0.0], [3.0, 3.0]]), np.array([[4.0, 3.0], [0.0, 3.0]])],
}
"""Of the row and the column player, both by the row player's action and the column player's."""
CELLS = 400
GRID = np.linspace(0.0, 1.0, CELLS + 1)
"""Probabilities of a player's first action."""


def aversion(gamma: float, floor: float) -> RiskAversion:
    return RiskAversion(gamma=gamma, floor=floor)


def beliefs(size: int, first: float, second: float) -> list[np.ndarray]:
    """Of two players: `first` and `second` on the first action, and all but a tenth of the rest on the last."""
    found = []
    for chance in (first, second):
        rest = np.full(size - 1, 0.1 * (1.0 - chance) / max(1, size - 2))
        rest[-1] = 1.0 - chance - rest[:-1].sum()
        found.append(np.array([chance, *rest]))
    return found


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("game", ["pennies", "uneven", "rock_paper_scissors", "potential", "congestion"])
def test_exploitability_falls_in_zero_sum_and_potential_games(game: str, floor: float, gamma: float) -> None:
    """Contract: the learner converges in both kinds, with and without aversion: ten times the play takes away more than half.
    With aversion answers are mixed, and in zero-sum games it is far quicker."""
    payoffs, settings = GAMES[game], aversion(gamma, floor)
    start = beliefs(len(payoffs[0]), 0.9, 0.3)
    found = [exploitability(payoffs, fictitious_play(payoffs, start, settings, length), settings) for length in (10, 100, 1000)]
    assert found[0] > 0.08
    assert all(later < earlier / 2 for earlier, later in pairwise(found))
    zero_sum = game in ("pennies", "uneven", "rock_paper_scissors")
    assert found[2] < (1e-3 if zero_sum and gamma else 0.07)


def regrets(payoffs: list[np.ndarray], gamma: float, floor: float, variance: str) -> np.ndarray:
    """What both players of a game of two actions each could gain at every profile (p, q) of the grid, [p, q]: by definition, from
    the utilities of all grid strategies."""
    total = np.zeros((len(GRID), len(GRID)))
    for player, table in enumerate(payoffs):
        own_first = table if player == 0 else table.T
        own, other = np.meshgrid(GRID, GRID.clip(floor, 1.0 - floor), indexing="ij")
        chances = [[own * other, own * (1 - other)], [(1 - own) * other, (1 - own) * (1 - other)]]
        mean = sum(chances[a][b] * own_first[a, b] for a in range(2) for b in range(2))
        if variance == "total":
            spread = sum(chances[a][b] * (own_first[a, b] - mean) ** 2 for a in range(2) for b in range(2))
        else:
            facing = [own * own_first[0, b] + (1 - own) * own_first[1, b] for b in range(2)]
            spread = other * (facing[0] - mean) ** 2 + (1 - other) * (facing[1] - mean) ** 2
        worth = mean - gamma * spread
        gain = worth.max(0) - worth
        total += gain if player == 0 else gain.T
    return total


@pytest.mark.parametrize(
    ("game", "values", "equilibria"),
    [
        ("pennies", {"gamma": 0.5, "floor": 0.1}, 1),
        ("uneven", {"gamma": 0.0, "floor": 0.0}, 1),
        ("uneven", {"gamma": 0.5, "floor": 0.0}, 1),
        ("uneven", {"gamma": 2.0, "floor": 0.1}, 1),
        ("congestion", {"gamma": 0.5, "floor": 0.1}, 3),
        ("potential", {"gamma": 0.5, "floor": 0.0}, 3),
        ("stag_hunt", {"gamma": 0.5, "floor": 0.1}, 1),
    ],
)
def test_learnt_strategies_are_equilibria_of_an_exhaustive_search(game: str, values: dict[str, Any], equilibria: int) -> None:
    """Contract: from any beliefs, play ends at a profile from which no strategy of the grid gains; where the grid has one
    equilibrium, mixed or not, at that."""
    settings = RiskAversion.model_validate(values)
    lost = regrets(GAMES[game], settings.gamma, settings.floor, settings.variance)
    minima = equilibria_of(lost)
    assert len(minima) == equilibria
    for first, second in ((0.05, 0.7), (0.4, 0.7), (0.95, 0.1), (0.95, 0.7)):
        ends = fictitious_play(GAMES[game], beliefs(2, first, second), settings, 3000)
        place = np.array([one[0] for one in ends])
        assert min(np.abs(place - minimum).max() for minimum in minima) < 0.025, (first, second)


def test_aversion_to_all_draws_may_leave_no_equilibrium() -> None:
    """With `variance: total` mixing is itself a risk: where no pure profile is an equilibrium, there need not be any. In matching
    pennies every action has the same risk, and there is one."""
    assert regrets(GAMES["uneven"], 0.5, 0.1, "total").min() > 0.07
    assert equilibria_of(regrets(GAMES["pennies"], 0.5, 0.1, "total"))[0].tolist() == [0.5, 0.5]


def equilibria_of(lost: np.ndarray) -> list[np.ndarray]:
    """Profiles (p, q) without gain but for the grid's width, one for each of those that hang together."""
    left = {tuple(place) for place in np.argwhere(lost <= 3.0 / CELLS)}
    found = []
    while left:
        waiting = [left.pop()]
        together = []
        while waiting:
            place = waiting.pop()
            together.append(place)
            near = {(place[0] + right, place[1] + up) for right in (-1, 0, 1) for up in (-1, 0, 1)} & left
            left -= near
            waiting.extend(near)
        best = min(together, key=lambda place: lost[place])
        found.append(np.array([GRID[best[0]], GRID[best[1]]]))
    return found
