"""Settings of auto-regressive soft Q-learning; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section


class DemoTerm(Section):
    """What holds the policy near the data's actions (stages/control/soft_q/arsq.py)."""

    kind: Literal["none", "logsumexp", "margin"] = "none"
    """logsumexp: the other bins' soft maximum against the data's bin; margin: their mean against it."""
    weight: NonNegative = 1.0
    temperature: Positive = 1.0
    """Of logsumexp."""
    least: float = -1.0
    """The term of a position stops falling here."""

    @model_validator(mode="after")
    def _idle(self) -> DemoTerm:
        idle = {"none": {"weight", "temperature", "least"}, "margin": {"temperature"}, "logsumexp": set()}[self.kind]
        if named := sorted(idle & self.model_fields_set):
            raise ValueError(f"{named[0]} has no effect with kind: {self.kind}; remove it")
        return self


class JointActions(Section):
    """Offline Q-learning over actions of two parts that depend on each other (stages/control/soft_q/joint_actions.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    levels: Annotated[int, Field(ge=1, le=4)] = 1
    """Each zooms into the chosen bin of the one before."""
    bins: Annotated[int, Field(ge=2, le=64)] = 8
    """Per dimension and level."""
    condition: Literal["prefix", "none"] = "prefix"
    """prefix: a dimension's values depend on the bins chosen before; none: dimensions are independent."""
    alpha: Positive = 0.05
    """Temperature of the soft values, in units of reward."""
    demo: DemoTerm = DemoTerm()
    data: Count = 2000
    noise: NonNegative = 0.5
    """Standard deviation of the rewards' noise."""
    width: Count = 64
    layers: Count = 2
    updates: Count = 800
    batch: Count = 128
    learning_rate: Positive = 3e-3
