"""A task, what opens its episodes, and what counts as solving it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
SUCCESS_TERM = "success"
"""The reward term by which an environment tells success where returns do not: 1 in the step that solves the task, 0 in others."""


@dataclass(frozen=True)
class Task:
    """One thing to do. `spec` is plain JSON and holds all that the environment needs to start it."""

    task_id: str
    domain: str
    split: Split
    seed: int
    prompt: str
    spec: Mapping[str, Any]
    difficulty: float
    """A number that grows with difficulty, in the domain's own units (hops, quest length, ...)."""
    cluster: str = ""
    """Tasks that share a world (a compiled game, an encyclopaedia article) share a cluster; never split across splits."""


def succeeded(reward: float, terms: Mapping[str, float]) -> bool:
    """Whether an episode with this return and these terms solved its task: by its term `SUCCESS_TERM`, or where it has none by a
    return that reaches 1."""
    return terms.get(SUCCESS_TERM, reward) >= 1.0 - 1e-9


def opening(prompt: str, observation: str) -> str:
    """The first user message of an episode: the task's prompt, then the first observation where there is one."""
    return "\n".join(part for part in (prompt, observation) if part)
