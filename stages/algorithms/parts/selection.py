"""Which training tasks rl may draw. What selects them: stages/training/rl/curriculum.py. Light to import."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from stages.runtime.validation import NonNegative, Section, Share


class Histogram(Section):
    """Shares of easy, medium and hard tasks; only their proportions matter."""

    easy: NonNegative = 1.0
    """Tasks of a success rate of easy_min or more."""
    medium: NonNegative = 1.0
    """Tasks in between."""
    hard: NonNegative = 1.0
    """Tasks of a success rate of hard_max or less."""

    @model_validator(mode="after")
    def _some(self) -> Histogram:
        if self.easy + self.medium + self.hard == 0:
            raise ValueError("easy, medium and hard are all 0: no task would be left")
        return self


class Selection(Section):
    """Which training tasks RL may draw."""

    kind: Literal["all", "model_aware"] = "all"
    """`model_aware`: only tasks that rollout measured and that the SFT policy solves sometimes, weighted by `target`."""
    easy_min: Share = 0.75
    """Success rate from which a task is easy."""
    hard_max: Share = 0.25
    """Success rate up to which a task is hard."""
    target: Histogram = Histogram()

    @model_validator(mode="after")
    def _order(self) -> Selection:
        if self.hard_max >= self.easy_min:
            raise ValueError(f"hard_max ({self.hard_max}) must be below easy_min ({self.easy_min})")
        return self
