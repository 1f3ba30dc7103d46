"""Settings that restrict the training tasks of rl; stages/training/rl/curriculum.py applies them. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import model_validator

from stages.algorithms.parts.part import AppliesTo, Part
from stages.runtime.validation import NonNegative, Section, Share

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Histogram(Section):
    """Shares of easy, medium and hard tasks; only their proportions matter."""

    easy: NonNegative = 1.0
    """Tasks with a success rate of at least easy_min."""
    medium: NonNegative = 1.0
    """Tasks in between."""
    hard: NonNegative = 1.0
    """Tasks with a success rate of at most hard_max."""

    @model_validator(mode="after")
    def _some(self) -> Histogram:
        if self.easy + self.medium + self.hard == 0:
            raise ValueError("easy, medium and hard are all 0, which selects no tasks; set one above 0")
        return self


class Selection(Part):
    """Which training tasks RL may use."""

    data = ("episodes",)

    kind: Literal["all", "model_aware"] = "all"
    """`model_aware`: only tasks that the SFT policy solved sometimes in rollout, weighted by `target`."""
    easy_min: Annotated[Share, AppliesTo("kind", "model_aware")] = 0.75
    """Success rate from which a task is easy."""
    hard_max: Annotated[Share, AppliesTo("kind", "model_aware")] = 0.25
    """Success rate up to which a task is hard."""
    target: Annotated[Histogram, AppliesTo("kind", "model_aware")] = Histogram()

    @model_validator(mode="after")
    def _order(self) -> Selection:
        if self.hard_max >= self.easy_min:
            raise ValueError(f"hard_max ({self.hard_max}) must be below easy_min ({self.easy_min})")
        return self

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        if self.kind == "model_aware" and section("rollout").attempts < 2:
            yield (
                "rl.selection.kind: model_aware selects tasks that are solved sometimes, which rollout.attempts: 1 can't show: "
                "set attempts to at least 2 (the paper: 8)"
            )
