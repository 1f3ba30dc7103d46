"""Settings of learning in games; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Section, Share

PAYOFFS: dict[str, list[list[list[float]]]] = {
    "stag_hunt": [[[4.0, 0.0], [3.0, 3.0]], [[4.0, 3.0], [0.0, 3.0]]],
    "chicken": [[[0.0, -1.0], [1.0, -5.0]], [[0.0, 1.0], [-1.0, -5.0]]],
    "matching_pennies": [[[1.0, -1.0], [-1.0, 1.0]], [[-1.0, 1.0], [1.0, -1.0]]],
}
"""Of the row and the column player, both by the row player's action (outer) and the column player's."""


class RiskAversion(Section):
    """A player's utility: mean payoff minus `gamma` times its variance (stages/control/games/risk_averse.py)."""

    gamma: NonNegative = 0.5
    """Per unit of payoff; 0: Nash equilibria."""
    variance: Literal["opponent_only", "total"] = "opponent_only"
    """opponent_only: of the payoff averaged over the player's own draws; total: of the payoff."""
    floor: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Least probability that a player gives each action of a co-player. With 0 a pure co-player is no risk."""
    entropy: NonNegative = 0.0
    """Weight of the entropy in the best response."""
    unit_payoffs: bool = False
    """Divide each player's payoffs by their standard deviation first, so that gamma does not depend on their scale."""


class MatrixGame(RiskAversion):
    """Fictitious play from random beliefs (stages/control/games/matrix_games.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    game: Literal["stag_hunt", "chicken", "matching_pennies"] = "stag_hunt"
    payoffs: list[list[list[float]]] | None = None
    """Instead of `game`: of the row and the column player, each by the row player's action and the column player's."""
    starts: Count = 100
    """Random first beliefs, each of which is played from."""
    iterations: Count = 2000
    """Of play from each start; fewer than the method's usual 5,000, which change little in small games."""

    @property
    def table(self) -> list[list[list[float]]]:
        return PAYOFFS[self.game] if self.payoffs is None else self.payoffs

    @model_validator(mode="after")
    def _fits(self) -> MatrixGame:
        if self.payoffs is not None and "game" in self.model_fields_set:
            raise ValueError(f"game {self.game} has no effect with payoffs; remove one of them")
        shapes = {(len(matrix), *(len(row) for row in matrix)) for matrix in self.table}
        if len(self.table) != 2 or len(shapes) != 1 or len(set(next(iter(shapes))[1:])) != 1:
            raise ValueError("payoffs must be two matrices of one shape, the row player's and the column player's")
        most = max(len(self.table[0]), len(self.table[0][0]))
        if min(len(self.table[0]), len(self.table[0][0])) < 1 or self.floor * most > 1:
            raise ValueError(f"floor {self.floor} is too much for {most} actions; lower it to at most {1 / max(most, 1):g}")
        return self


class Goofspiel(Section):
    """Two learners of a Markov game whose equilibria are known (stages/control/games/goofspiel.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    cards: Annotated[int, Field(ge=2, le=5)] = 3
    handicap: Annotated[int, Field(ge=0)] = 0
    """How many of the row player's highest cards are worth 0."""
    learner: Literal["minimax_q", "independent_q"] = "minimax_q"
    sweeps: Count = 300
    """Updates of every state."""
    exploration: Share = 0.2
    """independent_q: probability of a random action."""
    rate_power: Annotated[float, Field(gt=0.5, le=1.0)] = 0.7
    """The rate falls with the sweeps to this power; convergence needs more than 0.5."""

    @model_validator(mode="after")
    def _playable(self) -> Goofspiel:
        if self.handicap > self.cards:
            raise ValueError(f"handicap {self.handicap} is more than the {self.cards} cards; lower it")
        if self.learner == "minimax_q" and "exploration" in self.model_fields_set:
            raise ValueError("exploration has no effect with learner: minimax_q, which explores evenly; remove it")
        return self
