"""Settings of off-policy learning; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.control.off_policy.model_settings import Dynamics
from stages.runtime.validation import Count, NonNegative, Positive, Section, refuse_idle
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
    activation: Literal["relu", "silu", "tanh", "gelu"] = "relu"
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


class CriticLipschitz(Lipschitz):
    """`Lipschitz` with what the critics of the off-policy loop have beyond it."""

    layers: Literal["all", "hidden"] = "all"
    """Of spectral: the layers whose norms are bounded. hidden: all but the last, so that large values can be reached."""
    reciprocal: Literal["bound", "always"] = "bound"
    """Of spectral. bound: a layer is divided by max(1, norm / beta); always: by norm / beta, which sets every norm to beta."""
    start: Literal["random", "both_signs"] = "random"
    """Of robust: where the ascent begins, as the squared change has no slope at the state itself. random: in the ball;
    both_signs: without a draw, at the end of the ball along the value's slope or against it, whichever changes the value more,
    which is the first of the `steps`."""
    robust_target: bool = False
    """Of robust: targets use the smallest value within `epsilon` of the next state, for the action drawn there, which is a robust
    Bellman backup. Not confirmed to be the paper's; ours."""

    @model_validator(mode="after")
    def _forms(self) -> CriticLipschitz:
        spectral, robust = (self.kind == "spectral", "kind: spectral"), (self.kind == "robust", "kind: robust")
        needs = {"layers": spectral, "reciprocal": spectral, "start": robust, "robust_target": robust}
        refuse_idle(self, "lipschitz.", needs)
        return self


class OffPolicy(Loop):
    """Soft actor-critic (SAC) on one task; critics as an ensemble, of which the most pessimistic one counts."""

    updates_per_step: Count = 1
    update_every: Count = 1
    """Steps of all environments between rounds of updates, of which each has `updates_per_step` per environment."""
    log_std_range: Annotated[list[float], Field(min_length=2, max_length=2)] = [-20.0, 2.0]
    """Least and most logarithm of the policy's standard deviation, before tanh."""
    critic: Literal["scalar", "gaussian"] = "scalar"
    """scalar: SAC; gaussian: DSAC-T, with the settings of `gaussian`."""
    critics: Count = 2
    diversity: NonNegative = 0.0
    """Weight of the similarity between the critics' gradients by the action, relative to the sum of the critics' mean squared
    errors: eta of EDAC and RAVL. Means something for two action dimensions or more."""
    gaussian: GaussianCritic = GaussianCritic()
    aggregate: Literal["min", "mean", "min_of_2"] = "min"
    """Of scalar critics: the ensemble's value, in targets and for the policy. min: RAVL's, the most pessimistic member's; mean:
    not pessimistic; min_of_2: the smaller of two members, averaged over all pairs of them. The paper does not say which two: this
    is ours, the expectation of REDQ's target (arXiv 2101.05982)."""
    unit_features: bool = False
    """Divide the features before the last layer of policy and critics by their Euclidean length, as VaGraM's code does."""
    lipschitz: CriticLipschitz = CriticLipschitz()
    dynamics: Dynamics | None = None
    """null: learn from real transitions alone."""
    policy_learning_rate: Positive | None = None
    """null: `learning_rate`, which is the critics'."""
    alpha: Positive = 1.0
    """Weight of the entropy; with tune_alpha, at the start."""
    tune_alpha: bool = True
    """Learn alpha such that the policy's entropy is `target_entropy`."""
    target_entropy: float | None = None
    """With tune_alpha; null: minus the number of action dimensions."""
    alpha_learning_rate: Positive | None = None
    """With tune_alpha; null: the policy's."""
    delay: Count = 1
    """Critic updates per update of the policy, alpha and the target networks."""
    target_policy: bool = False
    """Draw next actions from a slow copy of the policy."""
    target_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """Share of the networks in their slow copies per update."""
    target_every: Count | None = None
    """Critic updates per update of the slow copies; null: as many as `delay`."""

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
        if self.update_every > 1 and self.update_every % self.environments:
            raise ValueError(f"update_every {self.update_every} must be a multiple of environments {self.environments}")
        if self.log_std_range[0] >= self.log_std_range[1]:
            raise ValueError(f"log_std_range {self.log_std_range}: the first must be below the second")
        for name in ("alpha_learning_rate", "target_entropy"):
            if getattr(self, name) is not None and not self.tune_alpha:
                raise ValueError(f"{name} has no effect with tune_alpha: false; remove it")
        scalar = (self.critic == "scalar" and self.critics > 1, "critic: scalar with two critics or more")
        refuse_idle(self, "", {"aggregate": scalar})
        if self.lipschitz.robust_target and self.critic != "scalar":
            raise ValueError(f"lipschitz.robust_target needs critic: scalar, not {self.critic}; remove it")
        if self.unit_features and self.lipschitz.kind == "spectral":
            raise ValueError(
                "lipschitz.kind: spectral bounds no slope with unit_features, since short features are made longer; remove one"
            )
        return self
