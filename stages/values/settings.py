"""Scalar heads and the models of value that are fitted to stored data, as params.yaml names them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import NonNegative, Positive, Section, refuse_idle


class HeadParams(Section):
    """How a scalar is learnt: by squared error, or by cross-entropy over a support of `bins` values."""

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
    """For `refuse_idle`: how a model is fitted counts where there is one."""
    return dict.fromkeys(Fitting.model_fields, (kind != "none", "a kind other than none"))


class ValueModel(Fitting):
    """The step-value model: the reward still to come that the SFT policy can expect after a history."""

    valid_share: ValidShare = 0.15
    """Of the tasks, held out to judge by: this model, the Q-model, which may start from it, and the progress estimator."""
    head: HeadParams = HeadParams()


class QModel(Fitting):
    """What ranks the actions that a policy could take: stages/values/q_model.py."""

    kind: Literal["none", "step_dpo", "trajectory_dpo", "regression"] = "none"
    """step_dpo: a copy of the SFT policy learns the preference pairs, Q = beta (log pi - log pi_ref) of the action;
    trajectory_dpo: it learns whole right and wrong episodes of a task; regression: a scalar head learns the labels' Q of each
    action."""
    learning_rate: Positive = 1e-4
    """AdamW's."""
    init: Literal["sft", "value_model"] = "sft"
    """regression: the backbone it starts from."""
    beta: Positive = 0.1
    """step_dpo, trajectory_dpo."""
    length_normalise: bool = False
    """step_dpo, trajectory_dpo: log-ratios per token in place of sums, in training and at choice alike."""
    head: HeadParams = HeadParams()
    """regression."""
    conservative: NonNegative = 0.0
    """regression: weight of logsumexp_a Q - E_policy Q over the actions tried from one history."""

    @model_validator(mode="after")
    def _counts(self) -> QModel:
        of_logs = (self.kind in ("step_dpo", "trajectory_dpo"), "kind: step_dpo or trajectory_dpo")
        of_values = (self.kind == "regression", "kind: regression")
        needs = dict.fromkeys(("beta", "length_normalise"), of_logs) | dict.fromkeys(("init", "head", "conservative"), of_values)
        refuse_idle(self, "q_model.", _fitting_needs(self.kind) | needs)
        return self


class Progress(Fitting):
    """The progress estimator: splits an episode's return into contributions of its turns (stages/values/progress.py)."""

    kind: Literal["none", "spa"] = "none"
    """spa: the contributions' sum learns the return of the rollouts."""
    head: HeadParams = HeadParams(loss="mse")
    """Of the sum."""

    @model_validator(mode="after")
    def _counts(self) -> Progress:
        refuse_idle(self, "progress.", _fitting_needs(self.kind) | {"head": (self.kind != "none", "kind: spa")})
        return self
