"""Settings of proximal policy optimisation; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, Share


class Ppo(Section):
    """PPO on one task (stages/control/on_policy/training.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    task: str = "CartPole-v1"
    """A name registered with Gymnasium; its actions are numbered or a bounded vector."""
    environments: Count = 8
    """Copies of the task that are played side by side."""
    horizon: Count = 32
    """Steps of each environment between updates."""
    steps: Count = 51_200
    """Of all environments together."""
    epochs: Count = 20
    """Passes over the steps of an iteration."""
    batch: Count = 256
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.98
    lam: Share = 0.8
    """Decay of generalised advantage estimation."""
    clip: Positive = 0.2
    """Of the importance ratio around 1."""
    value_weight: NonNegative = 0.5
    entropy: NonNegative = 0.0
    """Weight of the policy's entropy."""
    normalise: bool = True
    """Scale the advantages of each batch to mean 0 and standard deviation 1."""
    gradient_norm: Positive = 0.5
    """Longer gradients are scaled down to it."""
    width: Count = 64
    layers: Count = 2
    """Hidden layers of the policy and of the value network."""
    activation: Literal["relu", "silu", "tanh"] = "tanh"
    learning_rate: Positive = 1e-3
    evaluate_every: Count = 5120
    """Steps between evaluations. Each begins new episodes, so that a run can go on from there exactly."""
    evaluate_episodes: Count = 10
    checkpoint: str | None = None
    """File that the run is saved to after each evaluation, and from which it goes on; removed at the end. Results do not depend
    on it."""

    @model_validator(mode="after")
    def _rounds(self) -> Ppo:
        iteration = self.environments * self.horizon
        if self.evaluate_every % iteration:
            raise ValueError(
                f"evaluate_every {self.evaluate_every} must be a multiple of environments times horizon, {iteration}"
            )
        if self.steps % self.evaluate_every:
            raise ValueError(f"steps {self.steps} must be a multiple of evaluate_every {self.evaluate_every}")
        if self.normalise and 1 in (self.batch, iteration % self.batch):
            raise ValueError(
                f"normalise needs batches of two steps or more, and batch {self.batch} makes one of a single step out of the "
                f"{iteration} of an iteration (environments times horizon); change batch, or set normalise: false"
            )
        return self
