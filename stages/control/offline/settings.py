"""Settings of offline learning and of the data sets; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stages.control.off_policy.settings import OffPolicy
from stages.runtime.validation import Count, NonNegative, Positive, Section, refuse_idle

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
        agent = self.off_policy
        if agent.checkpoint or agent.environments != 1 or agent.distractors or agent.dynamics:
            raise ValueError("agent: data sets are made with one environment, without distractors, dynamics and checkpoint")
        if agent.replay < agent.steps:
            raise ValueError(f"agent.replay {agent.replay} can't hold the replay set of up to {agent.steps} steps; raise it")
        return self

    @property
    def off_policy(self) -> OffPolicy:
        return OffPolicy.model_validate(self.agent)


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
        needs = {"expectile": iql, "inverse_temperature": iql, "most_weight": iql, "diversity": sac}
        shared = dict.fromkeys(("critics", "target_rate", "gamma", "reward_scale"), values)
        refuse_idle(self, "", {**needs, **shared})
        if self.diversity and self.critics == 1:
            raise ValueError("diversity compares critics, of which there is one; raise critics, or remove diversity")
        return self
