"""Settings of learning in games; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Section, Share, refuse_idle

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
    level: float | None = None
    """In place of gamma, as the paper's abstract has it: the least variance among strategies of at least this mean payoff, and
    the highest mean where none has it."""
    variance: Literal["opponent_only", "total"] = "opponent_only"
    """opponent_only: of the payoff averaged over the player's own draws; total: of the payoff."""
    floor: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Least probability that a player gives each action of a co-player. With 0 a pure co-player is no risk."""
    entropy: NonNegative = 0.0
    """Weight of the entropy in the best response."""
    unit_payoffs: bool = False
    """Divide each player's payoffs by their standard deviation first, so that gamma does not depend on their scale."""
    delay: Count = 10
    """The step of fictitious play is 1 / (t + delay)."""

    @model_validator(mode="after")
    def _one_trade(self) -> RiskAversion:
        if self.level is None:
            refuse_idle(self, "", {"variance": (self.gamma > 0, "gamma above 0")})
            return self
        if "gamma" in self.model_fields_set:
            raise ValueError("gamma has no effect with level, whose multiplier it is; remove one of them")
        for name, given in (
            ("variance: total", self.variance == "total"),
            ("entropy", self.entropy),
            ("unit_payoffs", self.unit_payoffs),
        ):
            if given:
                raise ValueError(
                    f"{name} is not possible with level, the least mean of a payoff as the table has it; remove one of them"
                )
        return self


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
        if not self.table[0][0]:
            raise ValueError("payoffs: the column player has no action; give each row a number or more")
        if self.floor * most > 1:
            raise ValueError(f"floor {self.floor} is too much for {most} actions; lower it to at most {1 / most:g}")
        return self


class DrivingGame(RiskAversion):
    """Two cars at a merge learn by policy-space response oracles (stages/control/games/psro.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    gamma: NonNegative = 0.1
    """Per unit of return, of the meta-game and of the oracle; 0: PSRO towards Nash equilibria."""
    floor: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Least probability that a player gives each policy of the co-player in the meta-game. 0, since `deviating` co-players are in
    every estimate."""
    variance_coef: NonNegative | None = None
    """Weight of the squared deviation of an episode's return, in the oracle; null: gamma."""
    rounds: Annotated[int, Field(ge=1, le=20)] = 4
    """In each of which both players add a policy."""
    least_gain: NonNegative = 0.01
    """Stop when no new policy has more utility against the co-player's mixture than the own mixture by this share of it."""
    oracle_updates: Count = 150
    """Of the table of values that a new policy is greedy for."""
    oracle_episodes: Count = 200
    """Per update."""
    exploration: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Probability of a random action while a new policy is learnt."""
    meta_episodes: Annotated[int, Field(ge=2)] = 200
    """Per pair of policies."""
    iterations: Count = 2000
    """Of fictitious play in the meta-game."""
    deviating: Share = 0.1
    """Share of episodes in which the co-player deviates from its policy, in training and in the first evaluation."""
    deviants: Literal["random", "aggressive"] = "random"
    """What deviating co-players do: act at random, or always accelerate, as the drivers of the second evaluation do."""
    select: Literal["none", "mean", "mean_variance"] = "none"
    """Which policy drives in the evaluation. none: one drawn from the mixture for each episode; mean: the policy of the highest
    mean return against the co-player's mixture; mean_variance: of the highest mean minus gamma times the variance."""
    evaluate_episodes: Annotated[int, Field(ge=2)] = 2000

    @model_validator(mode="after")
    def _fits(self) -> DrivingGame:
        if self.floor * (self.rounds + 1) > 1:
            raise ValueError(
                f"floor {self.floor} is too much for {self.rounds + 1} policies; lower it to at most {1 / (self.rounds + 1):g}"
            )
        if self.unit_payoffs:
            raise ValueError("unit_payoffs has no effect here: the oracle's returns have the unit of reward; scale gamma instead")
        if self.level is not None:
            raise ValueError("level has no effect here: drivers trade by gamma; remove it")
        if self.entropy:
            raise ValueError("entropy has no effect here: responses in the meta-game have no entropy bonus; remove it")
        refuse_idle(self, "", {"deviants": (self.deviating > 0, "deviating above 0")})
        if self.select == "mean_variance" and not self.gamma:
            raise ValueError("select: mean_variance is select: mean with gamma 0; use that, or raise gamma")
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
