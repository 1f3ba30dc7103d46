"""Settings of off-policy learning; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.control.off_policy.model_settings import Dynamics
from stages.runtime.validation import Count, NonNegative, Positive, Section
from stages.values.settings import GaussianCritic, Lipschitz


class Loop(Section):
    """What every agent of the off-policy loop needs (stages/control/off_policy/training.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    task: str = "Pendulum-v1"
    """A name registered with Gymnasium, with the actions that the agent needs."""
    distractors: Annotated[int, Field(ge=0, le=1000)] = 0
    """Further numbers in the observations: oscillators that neither the actions nor the rewards have to do with."""
    environments: Count = 1
    """Copies of the task that are played side by side."""
    steps: Count = 20_000
    """Of all environments together."""
    warm_up: Count = 1000
    """First steps, with random actions and without updates."""
    reward_scale: Positive = 1.0
    """Factor of the rewards learnt from; returns are reported without it."""
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.99
    batch: Count = 256
    replay: Count = 1_000_000
    """Transitions kept."""
    width: Count = 64
    layers: Count = 2
    """Hidden layers of every network."""
    activation: Literal["relu", "silu", "tanh"] = "relu"
    learning_rate: Positive = 1e-3
    evaluate_every: Count = 2000
    """Steps between evaluations. Each begins new episodes, so that a run can go on from there exactly."""
    evaluate_episodes: Count = 10
    checkpoint: str | None = None
    """File that the run is saved to after each evaluation, and from which it goes on; removed at the end. Results do not depend
    on it."""

    @model_validator(mode="after")
    def _rounds(self) -> Loop:
        if self.steps % self.evaluate_every:
            raise ValueError(f"steps {self.steps} must be a multiple of evaluate_every {self.evaluate_every}")
        if self.evaluate_every % self.environments:
            raise ValueError(f"evaluate_every {self.evaluate_every} must be a multiple of environments {self.environments}")
        if self.warm_up >= self.steps:
            raise ValueError(f"warm_up {self.warm_up} leaves no updates in {self.steps} steps; lower it, or raise steps")
        if self.distractors % 2:
            raise ValueError(f"distractors {self.distractors} must be even: an oscillator is two numbers")
        return self


class OffPolicy(Loop):
    """Soft actor-critic (SAC) on one task; critics as an ensemble, of which the most pessimistic one counts."""

    updates_per_step: Count = 1
    critic: Literal["scalar", "gaussian"] = "scalar"
    """scalar: SAC; gaussian: DSAC-T, with the settings of `gaussian`."""
    critics: Count = 2
    diversity: NonNegative = 0.0
    """Weight of the similarity between the critics' gradients by the action, relative to the sum of the critics' mean squared
    errors: eta of EDAC and RAVL. Means something for two action dimensions or more."""
    gaussian: GaussianCritic = GaussianCritic()
    lipschitz: Lipschitz = Lipschitz()
    dynamics: Dynamics | None = None
    """null: learn from real transitions alone."""
    policy_learning_rate: Positive | None = None
    """null: `learning_rate`, which is the critics'."""
    alpha: Positive = 1.0
    """Weight of the entropy; with tune_alpha, at the start."""
    tune_alpha: bool = True
    """Learn alpha such that the policy's entropy is minus the number of action dimensions."""
    alpha_learning_rate: Positive | None = None
    """With tune_alpha; null: the policy's."""
    delay: Count = 1
    """Critic updates per update of the policy, alpha and the target networks."""
    target_policy: bool = False
    """Draw next actions from a slow copy of the policy."""
    target_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """Share of the networks in their slow copies per update."""

    @property
    def imagines(self) -> bool:
        """Whether the agent learns from a model's rollouts, too."""
        return self.dynamics is not None and self.dynamics.real_share < 1.0

    @model_validator(mode="after")
    def _fits(self) -> OffPolicy:
        if self.critic != "gaussian" and self.gaussian.model_fields_set:
            raise ValueError(f"gaussian has no effect with critic: {self.critic}; remove it, or set critic: gaussian")
        if self.diversity and self.critics == 1:
            raise ValueError("diversity compares critics, of which there is one; raise critics, or remove diversity")
        if self.alpha_learning_rate is not None and not self.tune_alpha:
            raise ValueError("alpha_learning_rate has no effect with tune_alpha: false; remove it")
        return self
