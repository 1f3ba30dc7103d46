"""Zero-sum Markov games of a finite horizon: exact values and equilibria by backward induction, best responses, exploitability.

After Shapley (1953): V(s) is the value of the matrix game r(s, a, b) + E V(s'), which linear programming solves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

Array = NDArray[np.float64]
S = TypeVar("S", bound=Hashable)


class MarkovGame(Protocol[S]):
    """The row player receives what the column player loses. Each step leads to later states only, so that games end."""

    def start(self) -> Sequence[tuple[float, S]]:
        """Probabilities of the first state."""
        ...

    def actions(self, state: S) -> tuple[int, int]:
        """How many actions each player has."""
        ...

    def reward(self, state: S) -> Array:
        """Of the row player, [A, B]."""
        ...

    def following(self, state: S, row: int, column: int) -> Sequence[tuple[float, S]]:
        """Probabilities of the next state; empty: the game is over."""
        ...


@dataclass
class Solution(Generic[S]):
    values: dict[S, float] = field(default_factory=dict)
    """Of the row player."""
    rows: dict[S, Array] = field(default_factory=dict)
    columns: dict[S, Array] = field(default_factory=dict)
    """Strategies of an equilibrium."""


def matrix_game(payoffs: Array) -> tuple[float, Array, Array]:
    """(value, row player's strategy, column player's) of a zero-sum game [A, B]: the value is max over x of min_b (x M)_b."""
    value, row = maximin(payoffs)
    return value, row, maximin(-payoffs.T)[1]


def maximin(payoffs: Array) -> tuple[float, Array]:
    """The row player's part of `matrix_game`."""
    actions, against = payoffs.shape
    if actions == 1:
        return float(payoffs.min()), np.ones(1)
    found = linprog(
        np.append(np.zeros(actions), -1.0),
        A_ub=np.column_stack([-payoffs.T, np.ones(against)]),
        b_ub=np.zeros(against),
        A_eq=np.append(np.ones(actions), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0.0, None)] * actions + [(None, None)],
    )
    strategy = found.x[:-1].clip(0.0)
    return float(found.x[-1]), strategy / strategy.sum()


def order(game: MarkovGame[S]) -> list[S]:
    """All states that can be reached, each after those that it leads to."""
    found: dict[S, None] = {}

    def visit(state: S) -> None:
        if state in found:
            return
        for row, column in np.ndindex(*game.actions(state)):
            for _, after in game.following(state, row, column):
                visit(after)
        found[state] = None

    for _, state in game.start():
        visit(state)
    return list(found)


def stage_game(game: MarkovGame[S], state: S, values: Mapping[S, float]) -> Array:
    """The state's matrix game [A, B]: its rewards and the expected `values` of what follows."""
    table = game.reward(state).astype(float)
    for row, column in np.ndindex(*table.shape):
        table[row, column] += sum(chance * values[after] for chance, after in game.following(state, row, column))
    return table


def solve(game: MarkovGame[S]) -> Solution[S]:
    """The value and an equilibrium of every state."""
    found: Solution[S] = Solution()
    for state in order(game):
        table = stage_game(game, state, found.values)
        found.values[state], found.rows[state], found.columns[state] = matrix_game(table)
    return found


def evaluate(game: MarkovGame[S], choose: Callable[[S, Array], float]) -> float:
    """Expected return of the row player from the start, where `choose` makes a state's value of its matrix game."""
    values: dict[S, float] = {}
    for state in order(game):
        values[state] = choose(state, stage_game(game, state, values))
    return sum(chance * values[state] for chance, state in game.start())


def exploitability(game: MarkovGame[S], rows: Mapping[S, Array], columns: Mapping[S, Array]) -> float:
    """What best responses to both players' strategies gain together; 0 at an equilibrium."""
    against_columns = evaluate(game, lambda state, table: float((table @ columns[state]).max()))
    against_rows = evaluate(game, lambda state, table: float((rows[state] @ table).min()))
    return against_columns - against_rows
