"""Settings in params.yaml of scalar heads and of the value models that are fitted to stored data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import NonNegative, Positive, Section, refuse_idle


class HeadParams(Section):
    """The loss of a scalar: squared error, or cross-entropy over a support of `bins` values."""

    loss: Literal["mse", "two_hot", "hl_gauss", "c51"] = "hl_gauss"
    """mse: squared error; two_hot, hl_gauss, c51: cross-entropy with a distribution over the bins."""
    v_min: float = -0.2
    """Lowest value of the support."""
    v_max: float = 1.2
    """Highest value of the support."""
    bins: Annotated[int, Field(ge=2, le=1024)] = 51
    """Of the support."""
    sigma_ratio: Positive = 0.75
    """hl_gauss: the Gaussian's standard deviation in bin widths."""

    @model_validator(mode="after")
    def _range(self) -> HeadParams:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min ({self.v_min}) must be below v_max ({self.v_max})")
        return self


ValidShare = Annotated[float, Field(gt=0.0, lt=0.9)]


class Fitting(Section):
    epochs: Positive = 2.0
    """Passes over the data."""
    learning_rate: Positive = 5e-4
    """AdamW's."""
    batch_tokens: Annotated[int, Field(ge=256)] = 4096
    """Tokens in one optimiser step, about."""


def _fitting_needs(kind: str) -> dict[str, tuple[bool, str]]:
    """For `refuse_idle`: fitting settings apply if there is a model."""
    return dict.fromkeys(Fitting.model_fields, (kind != "none", "a kind other than none"))


class ValueModel(Fitting):
    """The step-value model: the SFT policy's expected return after a history."""

    valid_share: ValidShare = 0.15
    """Fraction of the tasks held out for the evaluation of this model, the Q-model and the progress estimator."""
    head: HeadParams = HeadParams()


class QModel(Fitting):
    """Ranks candidate actions: stages/values/q_model.py."""

    kind: Literal["none", "step_dpo", "trajectory_dpo", "regression"] = "none"
    """step_dpo: a copy of the SFT policy learns the preference pairs, Q = beta (log pi - log pi_ref) of the action;
    trajectory_dpo: it learns pairs of successful and failed episodes; regression: a scalar head learns the labels' Q."""
    learning_rate: Positive = 1e-4
    """AdamW's."""
    init: Literal["sft", "value_model"] = "sft"
    """regression: the initial backbone."""
    beta: Positive = 0.1
    """step_dpo, trajectory_dpo."""
    length_normalise: bool = False
    """step_dpo, trajectory_dpo: log-ratios per token instead of sums, in training and when acting."""
    head: HeadParams = HeadParams()
    """regression."""
    conservative: NonNegative = 0.0
    """regression: weight of the CQL regulariser logsumexp_a Q - E_policy Q over the sampled actions of a history."""

    @model_validator(mode="after")
    def _counts(self) -> QModel:
        preference = (self.kind in ("step_dpo", "trajectory_dpo"), "kind: step_dpo or trajectory_dpo")
        regression = (self.kind == "regression", "kind: regression")
        needs = {"beta": preference, "length_normalise": preference, "init": regression, "head": regression}
        refuse_idle(self, "q_model.", _fitting_needs(self.kind) | needs | {"conservative": regression})
        return self


class Progress(Fitting):
    """The progress estimator: splits an episode's return into contributions of its turns (stages/values/progress.py)."""

    kind: Literal["none", "spa"] = "none"
    """spa: the sum of the contributions is trained on the rollouts' returns."""
    head: HeadParams = HeadParams(loss="mse")
    """Head of the sum."""

    @model_validator(mode="after")
    def _counts(self) -> Progress:
        refuse_idle(self, "progress.", _fitting_needs(self.kind) | {"head": (self.kind != "none", "kind: spa")})
        return self
