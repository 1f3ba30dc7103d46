"""How tasks are drawn while training. What draws them: stages/training/rl/curriculum.py. Light to import."""

from __future__ import annotations

from typing import Literal

from stages.runtime.validation import Section, Share


class Curriculum(Section):
    """How training tasks are drawn."""

    kind: Literal["uniform", "difficulty", "value"] = "difficulty"
    """`difficulty`: tasks are drawn with weight p(1-p) + floor, p the success measured by rollout and updated while training;
    `value`: p starts at what annotate's step-value model gives the task's first observation, so that all tasks have one."""
    floor: Share = 0.05
    """difficulty, value: added to every task's weight."""
