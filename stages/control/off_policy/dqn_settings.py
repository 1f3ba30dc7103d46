"""Settings of deep Q-learning; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from stages.control.off_policy.settings import Loop
from stages.runtime.validation import Count, Positive, Share
from stages.values.settings import HeadParams


class DeepQ(Loop):
    """DQN on one task with numbered actions (stages/control/off_policy/dqn.py)."""

    task: str = "CartPole-v1"
    """A name registered with Gymnasium, with numbered actions."""
    steps: Count = 50_000
    batch: Count = 64
    replay: Count = 100_000
    learning_rate: Positive = 2.3e-3
    evaluate_every: Count = 5000
    update_every: Count = 256
    """Steps between rounds of updates."""
    updates: Count = 128
    """In each round."""
    target_every: Count = 10
    """Steps between copies of the weights to the target network."""
    double: bool = False
    """Choose the next action by the network and value it by the target network (double DQN)."""
    head: HeadParams = HeadParams(loss="mse")
    """What Q is learnt as: a number, or a distribution over a support (docs/values.md)."""
    huber: Positive | None = 1.0
    """With head.loss mse: errors count linearly beyond this; null: never."""
    exploration: Annotated[float, Field(gt=0.0, le=1.0)] = 0.16
    """Share of the steps over which the probability of a random action falls from 1 to `least_exploration`."""
    least_exploration: Share = 0.04
    gradient_norm: Positive = 10.0
    """Longer gradients are scaled down to it."""

    @model_validator(mode="after")
    def _fits(self) -> DeepQ:
        if self.head.loss != "mse" and "huber" in self.model_fields_set:
            raise ValueError(f"huber has no effect with head.loss: {self.head.loss}; remove it, or set head.loss: mse")
        for name in ("update_every", "target_every"):
            if getattr(self, name) % self.environments:
                raise ValueError(f"{name} {getattr(self, name)} must be a multiple of environments {self.environments}")
        return self
