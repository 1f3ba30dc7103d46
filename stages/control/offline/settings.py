"""Settings of offline learning and of the data sets; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from stages.control.off_policy.model_settings import Dynamics, Horizon
from stages.control.off_policy.settings import OffPolicy
from stages.runtime.validation import Count, NonNegative, Positive, Section, explain, refuse_idle

KINDS = ("random", "medium", "replay", "expert")
"""Of a task's data sets: a random player; the agent when it first reaches `medium_return`; all that it had seen by then; the
agent after all its steps."""


class DataSets(Section):
    """The data sets of one task, made by one agent of the off-policy loop (stages/control/offline/collecting.py)."""

    agent: dict[str, Any]
    """Keys of `OffPolicy` (stages/control/off_policy/settings.py); its `steps` make the expert."""
    medium_return: float
    """The agent behind medium and replay is that of the first evaluation with at least this mean return."""
    episodes: Count = 50
    """In each of random, medium and expert."""

    @model_validator(mode="after")
    def _fits(self) -> DataSets:
        try:
            agent = self.off_policy
        except ValidationError as error:
            raise ValueError(explain(error, OffPolicy, "agent")) from error
        if agent.checkpoint or agent.environments != 1 or agent.distractors or agent.dynamics:
            raise ValueError("agent: data sets are made with one environment, without distractors, dynamics and checkpoint")
        if agent.replay < agent.steps:
            raise ValueError(f"agent.replay {agent.replay} can't hold the replay set of up to {agent.steps} steps; raise it")
        return self

    @property
    def off_policy(self) -> OffPolicy:
        return OffPolicy.model_validate(self.agent)


MODEL = (
    *("kind", "loss", "members", "elites", "layers", "width", "learning_rate", "weight_decay", "batch", "validation", "epochs"),
    *("patience", "least_improvement", "output_noise", "penalty", "penalty_weight"),
)
"""Keys of `Dynamics` that only a learnt model has."""


class OfflineDynamics(Dynamics):
    """A model of the data set, fitted once, from whose rollouts the agent learns too: the trainer on which RAVL is compared with
    penalised models (stages/control/offline/imagination.py)."""

    exact: bool = False
    """The task's own dynamics in place of a learnt model, so that no error is the model's; of Pendulum-v1 alone."""
    fit_every: Count = 1000
    """Updates between rollouts, each by the policy as it is then."""
    kept_fits: Count = 5
    """Times of rolling out that are learnt from."""
    horizon: Horizon = Horizon(first=5, last=5)
    """By updates."""

    @model_validator(mode="after")
    def _offline(self) -> OfflineDynamics:
        if self.loss in ("vaml", "vagram"):
            raise ValueError(f"loss {self.loss} weighs errors by values, which are random when the model of a data set is fitted")
        refuse_idle(self, "", {"ramp": (False, "steps of the task, of which offline learning has none")})
        refuse_idle(self, "", dict.fromkeys(MODEL, (not self.exact, "exact: false")))
        return self


class Offline(Section):
    """Learning from a data set without playing (stages/control/offline/training.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    folder: str = "data/control"
    """Where data sets are, as in Minari's MINARI_DATASETS_PATH."""
    dataset: str = "pendulum/medium-v0"
    task: str | None = None
    """Evaluated on this one; null: on the one that the data set names."""
    method: Literal["bc", "iql", "sac"] = "iql"
    """bc: behaviour cloning; iql: implicit Q-learning; sac: soft actor-critic on the data, pessimistic by its critics (SAC-N)."""
    updates: Count = 5000
    batch: Count = 256
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.99
    reward_scale: Positive = 0.1
    """Factor of the rewards learnt from."""
    width: Count = 64
    layers: Count = 2
    learning_rate: Positive = 1e-3
    target_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """iql, sac: share of the critics in their slow copies per update."""
    critics: Count = 2
    """iql, sac: members of the ensemble; the most pessimistic one counts."""
    diversity: NonNegative = 0.0
    """sac: weight of the similarity between the critics' gradients by the action (EDAC)."""
    aggregate: Literal["min", "mean", "min_of_2"] = "min"
    """sac: the ensemble's value; see `OffPolicy`."""
    policy_learning_rate: Positive | None = None
    """sac; null: `learning_rate`."""
    alpha_learning_rate: Positive | None = None
    """sac: of the entropy's weight; null: the policy's."""
    log_std_range: Annotated[list[float], Field(min_length=2, max_length=2)] = [-20.0, 2.0]
    """sac: least and most logarithm of the policy's standard deviation, before tanh; -5 and 2 in RAVL's code."""
    tune_alpha: bool = True
    """sac: learn the entropy's weight, which is 1 at first."""
    dynamics: OfflineDynamics | None = None
    """sac: learn from a model's rollouts, too; null: from the data alone."""
    expectile: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.7
    """iql: which expectile of Q over the data's actions is the value; 0.5: the mean."""
    inverse_temperature: NonNegative = 3.0
    """iql: how much better actions count more in the policy's loss; 0: behaviour cloning."""
    most_weight: Positive = 100.0
    """iql: largest weight of an action."""
    evaluate_every: Count = 1000
    """Updates between evaluations."""
    evaluate_episodes: Count = 10
    checkpoint: str | None = None
    """File that the run is saved to after each evaluation, and from which it goes on; removed at the end. Results do not depend
    on it."""

    @model_validator(mode="after")
    def _fits(self) -> Offline:
        if self.updates % self.evaluate_every:
            raise ValueError(f"updates {self.updates} must be a multiple of evaluate_every {self.evaluate_every}")
        iql, sac = (self.method == "iql", "method: iql"), (self.method == "sac", "method: sac")
        values = (self.method != "bc", "method: iql or sac")
        needs = {"expectile": iql, "inverse_temperature": iql, "most_weight": iql}
        needs |= dict.fromkeys(
            ("diversity", "aggregate", "policy_learning_rate", "alpha_learning_rate", "tune_alpha", "log_std_range"), sac
        )
        needs |= {"dynamics": sac} | dict.fromkeys(("critics", "target_rate", "gamma", "reward_scale"), values)
        refuse_idle(self, "", needs)
        if self.diversity and self.critics == 1:
            raise ValueError("diversity compares critics, of which there is one; raise critics, or remove diversity")
        if self.log_std_range[0] >= self.log_std_range[1]:
            raise ValueError(f"log_std_range {self.log_std_range}: the first, the least, must be below the second")
        tuned = (self.tune_alpha, "tune_alpha: true")
        refuse_idle(self, "", {"aggregate": (self.critics > 1, "two critics or more"), "alpha_learning_rate": tuned})
        return self
