"""Transcripts of random play, through which the base model sees the environments but never a solved task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.environments.protocol import Observation, Step
from stages.pretraining.corpus import random_play
from stages.records.task import Task

TASKS = [Task(f"t{number}", "doors", "train", number, "find the way out.", {}, 1.0) for number in range(20)]


class Doors:
    """Two turns: the left door pays `reward`, the right one `other`; the observation states the amount."""

    def __init__(self, reward: float, other: float) -> None:
        self.paid = {"left": reward, "right": other}
        self.returns: list[float] = []

    def reset(self, task: Task) -> Observation:
        self.turn = 0
        self.returns.append(0.0)
        return Observation("two doors.")

    def step(self, action: str) -> Step:
        self.turn += 1
        self.returns[-1] += self.paid[action]
        return Step(Observation(f"paid {self.paid[action]}"), self.paid[action], True, self.turn == 2, False)

    def admissible(self) -> tuple[str, ...]:
        return ("left", "right")

    def close(self) -> None: ...


@pytest.mark.parametrize(("reward", "other"), [(1.0, 0.0), (0.25, 0.0), (1.0, -0.5)])
def test_transcripts_with_positive_return_are_dropped(reward: float, other: float, tmp_path: Path) -> None:
    """Contract: the base model never sees a task that was solved, fully or in part."""
    doors = Doors(reward, other)
    domain = SimpleNamespace(make=lambda folder: doors, settings=SimpleNamespace(max_turns=5))
    chats = random_play(domain, TASKS, tmp_path, seed=0, plays=2)  # type: ignore[arg-type]
    failed = sum(total <= 0 for total in doors.returns)
    assert len(doors.returns) == 2 * len(TASKS)
    assert 0 < failed < len(doors.returns), "random play should sometimes succeed"
    assert len(chats) == failed
    for chat in chats:
        assert sum(float(text.split()[-1]) for role, text in chat.messages[1:] if role == "user") <= 0
