"""Settings of learnt dynamics, a section of `OffPolicy`. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, Share, refuse_idle
from stages.values.settings import ValueAware


class Horizon(Section):
    """Length of the model's rollouts: linear from `first` to `last` between the steps `begin` and `end`."""

    first: Count = 1
    last: Count = 1
    begin: Annotated[int, Field(ge=0)] = 0
    end: Count = 1

    @model_validator(mode="after")
    def _order(self) -> Horizon:
        if self.begin >= self.end:
            raise ValueError(f"begin {self.begin} must be below end {self.end}")
        return self

    def at(self, step: int) -> int:
        share = min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0)
        return int(self.first + share * (self.last - self.first))


class ValueGradients(ValueAware):
    """`ValueAware` with what the agent's critics give reason for."""

    mask_ends: bool = True
    """An end of the task has no value: the gradient there is 0. false: as the reference code, which takes the critics' all the
    same."""
    floor: NonNegative = 0.0
    """vagram: least size of a weight, in units of the weights; 0: a dimension, or a whole model, without influence on the value
    is not learnt. Ours: the paper's remedy is the first fit alone."""


class Dynamics(Section):
    """A learnt model of the task, whose rollouts the agent learns from too (MBPO, arXiv 1906.08253). For tasks whose episodes
    end by their time limit alone, and those of stages/control/off_policy/terminations.py."""

    kind: Literal["deterministic", "probabilistic"] = "deterministic"
    """probabilistic: predict a Gaussian."""
    loss: Literal["mse", "nll", "vaml", "vagram"] = "mse"
    """nll: of the probabilistic model; vaml, vagram: value-aware, of the deterministic one."""
    value_aware: ValueGradients = ValueGradients()
    members: Count = 1
    elites: Count = 1
    """The best members by validation loss, one of which predicts each step of a rollout."""
    layers: Count = 2
    width: Count = 64
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 5e-5
    batch: Count = 256
    validation: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Share of the transitions that decides when a fit ends."""
    epochs: Count = 30
    """Most per fit."""
    patience: Count = 5
    """Epochs without a better validation loss after which a fit ends; the best weights are kept."""
    least_improvement: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """A validation loss is better if it is lower by more than this share of the best one; 0.01 in the code of MBPO and RAVL."""
    fit_every: Count = 250
    """Steps of the task between fits, each of which is followed by rollouts."""
    rollouts: Count = 10_000
    """From states of the replay buffer, after each fit."""
    kept_fits: Count = 4
    """Fits whose rollouts are learnt from."""
    horizon: Horizon = Horizon()
    output_noise: NonNegative = 0.0
    """Standard deviation of noise added to predicted states, in standard deviations of the states."""
    penalty: Literal["none", "mopo"] = "none"
    """mopo: subtract from the rewards of rollouts how uncertain the probabilistic model is (arXiv 2005.13239)."""
    penalty_weight: NonNegative = 1.0
    """Of mopo: times the largest length, over all members, of the predicted standard deviations of next state and reward."""
    real_share: Share = 0.05
    """Of the transitions that the agent learns from. 1: as without `dynamics`: no model is fitted, and none is rolled out."""
    mixture: Literal["within", "whole"] = "within"
    """within: of every batch; whole: a batch is either real or the model's."""
    ramp: Annotated[int, Field(ge=0)] = 0
    """Steps after the warm-up over which the model's share rises from 0 to 1 - real_share."""

    @model_validator(mode="after")
    def _fits(self) -> Dynamics:
        if self.elites > self.members:
            raise ValueError(f"elites {self.elites} are more than members {self.members}; lower elites, or raise members")
        if (self.loss == "nll") != (self.kind == "probabilistic"):
            wanted = "nll" if self.kind == "probabilistic" else "mse, vaml or vagram"
            raise ValueError(f"loss {self.loss} does not fit kind: {self.kind}, whose loss is {wanted}")
        if self.loss not in ("vaml", "vagram") and self.value_aware.model_fields_set:
            raise ValueError(f"value_aware has no effect with loss: {self.loss}; remove it, or set loss: vagram or vaml")
        if self.loss == "vaml" and self.value_aware.floor:
            raise ValueError("value_aware.floor has no effect with loss: vaml, whose terms cancel all the same; set loss: vagram")
        if self.penalty == "mopo" and self.kind != "probabilistic":
            raise ValueError(f"penalty mopo needs kind: probabilistic; a {self.kind} model has no spread to be uncertain by")
        refuse_idle(self, "", {"penalty_weight": (self.penalty == "mopo", "penalty: mopo")})
        return self
