"""Tasks: the record, the first message of its episodes, and the criterion for success."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
SUCCESS_TERM = "success"
"""Reward term of environments whose returns do not indicate success: 1 in the step that solves the task, 0 in others."""
JUDGMENT_TERMS = ("judge_true_accept", "judge_true_reject", "judge_false_accept", "judge_false_reject")
"""Reward terms of steps in which the agent judged a result: right or wrong, accepted or rejected."""


@dataclass(frozen=True)
class Task:
    """A task. `spec` is plain JSON with everything the environment needs to start it."""

    task_id: str
    domain: str
    split: Split
    seed: int
    prompt: str
    spec: Mapping[str, Any]
    difficulty: float
    """A number that grows with difficulty, in the domain's own units (hops, quest length, ...)."""
    cluster: str = ""
    """Tasks that share a world (a compiled game, an encyclopaedia article) share a cluster, which belongs to one split."""

    @property
    def unit(self) -> str:
        """The cluster, or without one the task itself. Tasks of one unit share a world, so their results depend on each other:
        statistics resample them together, and what must be independent of a task comes from another unit."""
        return self.cluster or self.task_id


def succeeded(reward: float, terms: Mapping[str, float]) -> bool:
    """Whether an episode with this return and these reward terms solved its task: its SUCCESS_TERM, or without one its return, is
    at least 1."""
    return terms.get(SUCCESS_TERM, reward) >= 1.0 - 1e-9


def opening(prompt: str, observation: str) -> str:
    """The first user message of an episode: the task's prompt, then the first observation if there is one."""
    return "\n".join(part for part in (prompt, observation) if part)
