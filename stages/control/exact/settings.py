"""Settings of the exact worlds' methods; experiments of lane control override them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, Share, refuse_idle

PENALISED = ("tv", "kl", "chi2")
CONSTRAINED = ("tv_constrained", "kl_constrained")


class CoalitionGame(Section):
    """Estimators of contributions in games whose values are known (stages/control/exact/estimators.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    game: Literal["nearly_additive", "random", "unanimity", "gloves"] = "nearly_additive"
    """nearly_additive: the sum of the members' weights plus a tenth as large a random part; random: a random value for each
    coalition; unanimity: 1 for all players together; gloves: 1 for a left and a right one, of which the last player has the only
    one."""
    players: Annotated[int, Field(ge=2, le=10)] = 5
    noise: NonNegative = 0.0
    """Standard deviation of one evaluation of a coalition."""
    estimator: Literal["permutation", "coalition_uniform"] = "permutation"
    """permutation: random orders of joining, of Shapley values; coalition_uniform: as in the reference code, which estimates
    Banzhaf values."""
    antithetic: bool = False
    """Of permutation: walk every order in reverse, too. At equal budget there are half as many orders."""
    budget: Count = 120
    """Evaluations of coalitions per estimate, at most."""
    repeats: Annotated[int, Field(ge=2)] = 200
    """Independent estimates."""

    @property
    def samples(self) -> int:
        """What the budget is enough for."""
        per_order = (self.players + 1) * (2 if self.antithetic else 1)
        return self.budget // (per_order if self.estimator == "permutation" else 2 * self.players)

    @model_validator(mode="after")
    def _fits(self) -> CoalitionGame:
        refuse_idle(self, "", {"antithetic": (self.estimator == "permutation", "estimator: permutation")})
        if not self.samples:
            raise ValueError(f"budget {self.budget} is not enough for one sample of {self.players} players; raise it")
        return self


class LinearPvi(Section):
    """Pessimistic value iteration on episodes of a linear MDP (stages/control/exact/r2pvi.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    robust: Literal["none", "tv", "kl", "chi2", "tv_constrained", "kl_constrained"] = "kl"
    """Divergence of the worst case; none: PEVI."""
    divergence_weight: Positive = 0.1
    """Weight of the divergence, in units of reward; large: not robust."""
    radius: Positive = 0.1
    """Of the constrained divergences."""
    beta: NonNegative = 1.0
    """Weight of the pessimism."""
    ridge: Positive = 0.1
    """Of the regressions."""
    penalty: Literal["quadrature", "sum", "full"] = "quadrature"
    """quadrature: the reference code's; sum: an upper bound of it, one term per factor; full: PEVI's, which robust: none has."""
    kl_regression: Literal["raw", "shifted"] = "raw"
    """raw: the reference code's, optimistic where a factor has little data, and the default to compare with the paper's figures;
    shifted: regresses exp(-V/weight) - 1."""
    chi2_direction: Literal["max", "min"] = "max"
    """max: the dual. min: a fault of one of the reference's two programs, to compare with."""
    weighting: Literal["none", "variance"] = "none"
    """variance: each episode's step counts by 1 / max(least_variance, variance of the next value), which a first run without
    weights estimates. Ours: the reference's correction of the variance is not confirmed, and is 0 here."""
    least_variance: Positive = 1.0
    """Of weighting: variance. In the simulated problem no next value varies by as much as 1: lower it to see an effect."""
    episodes: Count = 100
    world: Literal["simulated", "frozen_lake"] = "simulated"
    """simulated: the paper's five states; frozen_lake: FrozenLake-v1 with unit vectors of state and action as features, where
    policies are evaluated at other probabilities to slip."""
    horizon: Count = 30
    """frozen_lake: steps of an episode; the simulated problem has 3."""
    slip: Share = 2 / 3
    """frozen_lake: probability, in the episodes, that an action leads to one of its two sides; 2/3 is Gymnasium's."""
    delta: Share = 0.3
    strength: Share = 0.2
    """delta and strength: of the simulated problem; an action leaps with probability delta +- strength."""

    @model_validator(mode="after")
    def _probabilities(self) -> LinearPvi:
        if not self.strength <= self.delta <= 1 - self.strength:
            raise ValueError(
                f"delta {self.delta} +- strength {self.strength} must stay between 0 and 1; lower strength to at most "
                f"{min(self.delta, 1 - self.delta):g}"
            )
        return self

    @model_validator(mode="after")
    def _idle(self) -> LinearPvi:
        needs = {
            "divergence_weight": self.robust in PENALISED,
            "radius": self.robust in CONSTRAINED,
            "kl_regression": self.robust == "kl",
            "chi2_direction": self.robust == "chi2",
            "penalty": self.robust != "none",
        }
        for name, used in needs.items():
            if name in self.model_fields_set and not used and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with robust: {self.robust}; remove it")
        lake = (self.world == "frozen_lake", "world: frozen_lake")
        simulated = (self.world == "simulated", "world: simulated")
        worlds = {"horizon": lake, "slip": lake, "delta": simulated, "strength": simulated}
        refuse_idle(self, "", worlds | {"least_variance": (self.weighting == "variance", "weighting: variance")})
        return self


class TabularQ(Section):
    """Q-learning on a tabular task of Gymnasium's (stages/control/exact/tabular.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    task: str = "FrozenLake-v1"
    """One that lists its transitions: FrozenLake-v1, CliffWalking-v1, Taxi-v4."""
    horizon: Count = 30
    """Steps of an episode."""
    gamma: Share = 1.0
    episodes: Count = 20_000
    batch: Count = 20
    """Episodes played at once."""
    exploration: Share = 0.5
    """Probability of a random action."""
    rate_power: Annotated[float, Field(gt=0.5, le=1.0)] = 0.7
    """The rate falls with the visits to this power; convergence needs more than 0.5."""

    @model_validator(mode="after")
    def _whole(self) -> TabularQ:
        if self.episodes % self.batch:
            raise ValueError(f"episodes {self.episodes} must be a multiple of batch {self.batch}")
        return self


class LipschitzModel(Section):
    """Value iteration in a learnt model of a walk on a line (stages/control/exact/lipschitz_models.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    states: Annotated[int, Field(ge=3, le=401)] = 41
    """Evenly spread over [0, 1]."""
    move: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """How far the actions left and right lead; the third one stays."""
    noise: Positive = 0.05
    """Standard deviation of where an action leads."""
    goal: Share = 0.7
    cost: NonNegative = 0.05
    """Of a move. The reward is minus the distance from the goal minus this."""
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    samples: Count = 5
    """Transitions of each state and action that models are learnt from."""
    model: Literal["deterministic", "probabilistic"] = "deterministic"
    """deterministic: the state nearest to the samples' mean; probabilistic: the samples' shares."""
    members: Count = 1
    """Models, each of its own bootstrap sample if there are several; a prediction is one of theirs, drawn at random."""
    slope: Positive | None = None
    """Most slope of values: after every sweep they are replaced by a function of that slope near them. null: no limit."""
    operator: Literal["max", "mean", "mellowmax", "boltzmann"] = "max"
    """From action values to values. All but boltzmann are non-expansions, with which value iteration converges."""
    temperature: Positive = 0.1
    """mellowmax, boltzmann: of the actions."""

    @model_validator(mode="after")
    def _idle(self) -> LipschitzModel:
        soft = self.operator in ("mellowmax", "boltzmann")
        refuse_idle(self, "", {"temperature": (soft, "operator: mellowmax or boltzmann")})
        return self
