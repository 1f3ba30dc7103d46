"""shapley_marl: how much each member of a team contributes to the team's value.

A team of n players is a table of the values of its 2^n coalitions: entry c is the value of the coalition that contains player i
if bit i of c is set, so entry 0 is the empty coalition's. Entries may be arrays, e.g. one value per task.
"""

from __future__ import annotations

from math import factorial

import numpy as np

from stages.records.card import Card

CARD = Card(
    slug="shapley_marl",
    title="Shapley values of the members of a team",
    paper="arXiv 2110.01307",
    equation="phi_i = sum over C without i of |C|! (n - |C| - 1)! / n! (v(C + i) - v(C))",
    assumptions="Every coalition can be evaluated: members outside it are replaced (agents) or left out (merges).",
    reduces_to="A player's own gain in additive games.",
    tested_by="tests/control/exact/test_shapley.py",
    switch="python -m stages.control.exact.contributions",
)
MOST_PLAYERS = 16


class CoalitionError(ValueError):
    """The values of the coalitions do not describe a team."""


def player_count(values: np.ndarray) -> int:
    """n of a table [2^n, ...]. Raises CoalitionError unless 1 <= n <= MOST_PLAYERS and all values are finite."""
    n = max(len(values).bit_length() - 1, 0)
    if len(values) != 1 << n or not 1 <= n <= MOST_PLAYERS:
        raise CoalitionError(
            f"there are values of {len(values)} coalitions; a team of n players has 2^n, and n must be 1 to {MOST_PLAYERS}"
        )
    if not np.isfinite(values).all():
        raise CoalitionError("a coalition's value is not a finite number; evaluate it again")
    return n


def shapley(values: np.ndarray) -> np.ndarray:
    """Shapley values [n, ...] of a table [2^n, ...]; their sum is values[-1] - values[0]. Raises CoalitionError."""
    n = player_count(values)
    weights = np.array([factorial(size) * factorial(n - size - 1) / factorial(n) for size in range(n)])
    every, found = np.arange(len(values)), []
    for player in range(n):
        without = every[every >> player & 1 == 0]
        gains = values[without | 1 << player] - values[without]
        found.append(np.tensordot(weights[np.bitwise_count(without)], gains, axes=1))
    return np.stack(found)
