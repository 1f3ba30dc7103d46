"""A grid with a goal: an environment whose tasks are made from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.plugins import (
    Count,
    DomainSettings,
    Observation,
    RecipeDomain,
    Step,
    Task,
    ValueEnvironment,
    check_fields,
    splits_in_turn,
    stream,
)

MOVES = {"east": (1, 0), "north": (0, 1), "south": (0, -1), "west": (-1, 0)}


class MazeSettings(DomainSettings):
    """per_domain.maze.environment in params.yaml."""

    size: Count = 7


@dataclass(frozen=True)
class MazeState:
    """Everything that changes during an episode."""

    task_id: str
    x: int = 0
    y: int = 0
    turns: int = 0
    over: bool = False


class MazeEnvironment(ValueEnvironment[MazeState]):
    name = "maze"

    def _start(self, task: Task) -> tuple[MazeState, str]:
        self._size, self._goal = task.spec["size"], tuple(task.spec["goal"])
        return MazeState(task.task_id), "You are at 0 0."

    def step(self, action: str) -> Step:
        before = self._running()
        right, up = MOVES.get(action.strip(), (0, 0))
        x, y = before.x + right, before.y + up
        accepted = action.strip() in self.admissible()
        after = replace(before, x=x, y=y, turns=before.turns + 1) if accepted else replace(before, turns=before.turns + 1)
        won = (after.x, after.y) == self._goal
        truncated = not won and after.turns >= self._max_turns
        self._state = replace(after, over=won or truncated)
        text = "You have arrived." if won else f"You are at {after.x} {after.y}."
        return Step(Observation(text), float(won), accepted, terminated=won, truncated=truncated)

    def state_key(self) -> str:
        return f"{self.task.task_id}#{self._state.x} {self._state.y}"

    def admissible(self) -> Sequence[str]:
        if self._state.over:
            return []
        grid = range(self._size)
        return [move for move, (x, y) in MOVES.items() if self._state.x + x in grid and self._state.y + y in grid]

    def next_action(self) -> str | None:
        if self._state.over:
            return None
        return "east" if self._state.x < self._goal[0] else "north"


class MazeDomain(RecipeDomain[MazeSettings]):
    """Each split has its own goals."""

    name = "maze"
    Settings = MazeSettings

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        for split, index in splits_in_turn(count):
            rng, size = stream("maze", seed, split, index), self.settings.size
            goal = rng.randrange(1, size * size) if size > 1 else 1
            yield {"task_id": f"maze-{split}-{index:05d}", "split": split, "size": max(size, 2), "goal": goal}

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, {"task_id": str, "split": str, "size": int, "goal": int})
        if not 0 < record["goal"] < record["size"] ** 2:
            raise ValueError(f"'goal' must be between 1 and {record['size'] ** 2 - 1}, not {record['goal']}")

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        y, x = divmod(record["goal"], record["size"])
        return Task(
            task_id=record["task_id"],
            domain=self.name,
            split=record["split"],
            seed=record["goal"],
            prompt=f"Go to {x} {y}. Each turn, write east, north, south or west.",
            spec={"size": record["size"], "goal": [x, y]},
            difficulty=float(x + y),
            cluster=record["task_id"],
        )

    def make(self, folder: Path) -> MazeEnvironment:
        return MazeEnvironment(self.settings.max_turns)

    def entities(self, task: Task) -> set[str]:
        return {task.task_id}
