"""Models of value that are fitted to stored data: how they are fitted, Q-models, progress estimators."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.parameters.heads import HeadParams
from stages.validation import NonNegative, Positive, Section

ValidShare = Annotated[float, Field(gt=0.0, lt=0.9)]


class Fitting(Section):
    epochs: Positive = 2.0
    learning_rate: Positive = 5e-4
    batch_tokens: Annotated[int, Field(ge=256)] = 4096
    valid_share: ValidShare = 0.15
    """Of the tasks, held out to judge the model by."""


class ValueModel(Fitting):
    """The step-value model: what a history is worth to the SFT policy."""

    head: HeadParams = HeadParams()


class QModel(Fitting):
    """What ranks the actions that a policy could take: stages/values/q_model.py."""

    kind: Literal["none", "step_dpo", "trajectory_dpo", "regression"] = "none"
    """step_dpo: a copy of the SFT policy learns the preference pairs, Q = beta (log pi - log pi_ref) of the action;
    trajectory_dpo: it learns whole right and wrong episodes of a task; regression: a scalar head learns the labels' Q of each
    action."""
    learning_rate: Positive = 1e-4
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
    def _sense(self) -> QModel:
        if self.kind != "regression":
            for name, value, off in (("conservative", self.conservative, 0.0), ("init", self.init, "sft")):
                if value != off:
                    raise ValueError(
                        f"q_model.{name}: {value} belongs to kind: regression, and kind {self.kind} would ignore it; set it "
                        f"to {off}"
                    )
        elif self.length_normalise:
            raise ValueError(
                "q_model.length_normalise: true belongs to kinds step_dpo and trajectory_dpo; regression scores an action "
                "once, at its last token: set it to false"
            )
        return self


class Progress(Fitting):
    """The progress estimator: splits an episode's return into contributions of its turns (stages/values/progress.py)."""

    kind: Literal["none", "spa"] = "none"
    """spa: the contributions' sum learns the return of the rollouts."""
    head: HeadParams = HeadParams(loss="mse")
    """Of the sum."""
