"""A toy environment of three turns, and settings, tasks and outputs of the annotate stage on it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from stages.environments.protocol import Observation, Step
from stages.records.task import Task
from stages.runtime.stage import StageContext


class Toy:
    """Three turns; a hash of the actions decides on success."""

    def reset(self, task: Task) -> Observation:
        self.task, self.actions = task, ()
        return Observation(f"you are in the {task.task_id} room")

    def step(self, action: str) -> Step:
        self.actions = (*self.actions, action)
        end = len(self.actions) == 3
        won = end and hashlib.sha256(repr((self.task.task_id, self.actions)).encode()).digest()[0] < 128
        return Step(Observation(f"there is nothing here {len(self.actions)}"), float(won), True, end, False)

    def snapshot(self) -> Any:
        return self.task, self.actions

    def restore(self, state: Any) -> None:
        self.task, self.actions = state

    def state_key(self) -> str:
        return repr(self.actions)

    def close(self) -> None: ...


class ToyDomain:
    def make(self, folder: Path) -> Toy:
        return Toy()


VALUES = {
    "domains": ["toy"],
    "per_domain": {"toy": {}},
    "resources": {"threads": 1, "slots": 8},
    "model": {"max_length": 200},
    "rollout": {"tasks": 96},
    "annotate": {
        "tasks": 6,
        "iterations": 12,
        "chunk": 2,
        "expand_k": 3,
        "sampling": {"max_tokens": 2, "top_k": 3},
        "pairs": {"min_visits": 1},
        "value_model": {"rollouts": False},
    },
}


def tasks(count: int) -> list[Task]:
    return [Task(f"t{number:02d}", "toy", "train", number, "look", {}, 1.0) for number in range(count)]


def outputs(context: StageContext) -> dict[str, bytes]:
    files = [path for folder in ("data/annotated", "reports") for path in (context.root / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(context.root)): path.read_bytes() for path in sorted(files)}
