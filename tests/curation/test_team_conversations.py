"""Scripted conversations of a team."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stages.agent.team import Member
from stages.curation.team import conversation
from stages.environments.protocol import Observation, Step
from stages.records.task import SUCCESS_TERM, Task

TASK = Task("t", "toy", "train", 0, "guess", {}, 1.0)


class TwoTurns:
    """Pays `rewards`, and reports `success` at the end if it is not None."""

    def __init__(self, rewards: tuple[float, float], success: float | None) -> None:
        self.rewards, self.success, self.turns = rewards, success, 0

    def reset(self, task: Task) -> Observation:
        return Observation("")

    def step(self, action: str) -> Step:
        self.turns += 1
        terms = {} if self.success is None or self.turns < 2 else {SUCCESS_TERM: self.success}
        return Step(Observation("ok"), self.rewards[self.turns - 1], True, self.turns == 2, False, 1.0, terms)


@pytest.mark.parametrize(
    ("rewards", "success", "solved"),
    [
        ((-1.0, 0.0), 1.0, True),  # wordle's reward lmrl pays nothing for the solution
        ((0.5, 0.5), None, True),
        ((0.0, 1.0), None, True),
        ((0.0, 0.5), None, False),
        ((0.0, 1.0), 0.0, False),
    ],
)
def test_solved_plays_are_kept(rewards: tuple[float, float], success: float | None, solved: bool) -> None:
    """Contract: success is the environment's term, or without one a return of 1, whatever the last reward is."""
    domain: Any = SimpleNamespace(expert=lambda environment: "crane")
    environment: Any = TwoTurns(rewards, success)
    found = conversation(domain, environment, TASK, [Member(role="solver")])
    assert (found is not None) == solved
    assert found is None or [message["content"] for message in found["solver"]][1::2] == ["crane", "crane"]
