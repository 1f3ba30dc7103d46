"""Settings of models of a linear system; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, refuse_idle


class LinearModel(Section):
    """A model of limited rank of a linear system with distractors, from which a controller is designed
    (stages/control/linear/limited_models.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    loss: Literal["mse", "vaml", "vagram"] = "vagram"
    """What the model minimises: squared error, or the error weighted by the exact value's gradient."""
    rank: Count = 2
    """Of the model; the controlled part needs 2."""
    distractors: Annotated[int, Field(ge=0, le=100)] = 10
    """Dimensions of the state that nothing depends on: oscillators, two numbers each."""
    amplitude: Positive = 3.0
    """Standard deviation of the distractors; the controlled part's is 1."""
    noise: NonNegative = 0.05
    """Standard deviation of the noise on every dimension."""
    data: Count = 500
    """Transitions from random states with random actions."""
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    sweeps: Count = 100
    """Of alternating least squares."""

    @model_validator(mode="after")
    def _fits(self) -> LinearModel:
        if self.distractors % 2:
            raise ValueError(f"distractors {self.distractors} must be even: an oscillator is two numbers")
        if self.rank > (most := 2 + self.distractors):
            raise ValueError(f"rank {self.rank} is more than {most}, the dimensions of the state; lower it")
        refuse_idle(self, "", {"amplitude": (self.distractors > 0, "distractors")})
        return self
