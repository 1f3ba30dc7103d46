"""A small deterministic environment for tests of episodes."""

from __future__ import annotations

import os

from stages.environments.protocol import Observation, Step
from stages.records.task import Task
from stages.seeding import key64


class CountingEnvironment:
    """Ends after `spec["turns"]` actions; the last is rewarded if the hash of all actions is odd. Observations depend on the
    actions so far, so episodes with different actions diverge."""

    instances = 0

    def __init__(self) -> None:
        CountingEnvironment.instances += 1
        self.task: Task | None = None

    def reset(self, task: Task) -> Observation:
        self.task, self.actions = task, []
        return Observation(f"you are in room {task.seed}")

    def step(self, action: str) -> Step:
        if self.task is None:
            raise RuntimeError("reset first")
        self.actions.append(action)
        number = key64(*self.actions)
        over = len(self.actions) >= self.task.spec["turns"]
        ends = over and self.task.spec.get("ends", True)
        text = "" if over else "you see " + "key " * (number % 5)
        return Step(Observation(text), float(ends and number % 2), True, ends, over and not ends, 1.0, {"parity": number % 2})

    def snapshot(self):
        return (self.task, tuple(self.actions))

    def restore(self, state) -> None:
        self.task, self.actions = state[0], list(state[1])

    def state_key(self) -> str:
        return "|".join(self.actions)

    def admissible(self) -> list[str]:
        return []

    def close(self) -> None:
        self.task = None


class BrokenEnvironment(CountingEnvironment):
    def step(self, action: str) -> Step:
        raise OSError("the game crashed")


class ExitingEnvironment(CountingEnvironment):
    """Ends its process."""

    def step(self, action: str) -> Step:
        os._exit(3)


def toy_tasks(count: int, turns: int = 3, **spec) -> list[Task]:
    return [
        Task(
            f"toy-{index:03d}", "toy", "train", index, "take the key", {"turns": 1 + index % turns, **spec}, float(index % turns)
        )
        for index in range(count)
    ]
