"""Settings of task sampling in training; stages/training/rl/curriculum.py implements it. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from stages.algorithms.parts.part import AppliesTo, Part
from stages.runtime.validation import Share


class Curriculum(Part):
    """How training tasks are sampled."""

    data = ("episodes",)

    kind: Literal["uniform", "difficulty", "value"] = "difficulty"
    """`difficulty`: tasks are sampled with weight p(1-p) + floor, p the success rate measured by rollout and updated during
    training; `value`: p starts as the prediction of annotate's step-value model for the first observation, for every task."""
    floor: Annotated[Share, AppliesTo("kind", "difficulty", "value")] = 0.05
    """difficulty, value: added to every task's weight."""
