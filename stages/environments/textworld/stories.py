"""Loaded games, shared by all environments of a domain: interpreters, the games' logic, and the first states of tasks.

Loading a game takes as long as several steps, but copying an interpreter's memory, stack and registers in and out takes a
hundredth of a step. So one interpreter per game serves all episodes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jericho
from textworld.generator.game import Game

from stages.environments.textworld.world import World
from stages.records.task import Task

if TYPE_CHECKING:
    from stages.environments.textworld.environment import Snapshot

Memory = tuple[Any, ...]
"""An interpreter's memory, stack and registers; about 40 kB; immutable."""
_SEED = 1234


class Story:
    """One compiled game."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError for a missing game."""
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; run the curate stage to build the games")
        self._path = path
        self._frotz = jericho.FrotzEnv(str(path), _SEED)
        self._frotz.step("tw-trace-actions")
        self._guard = threading.Lock()
        self.first: Memory = self._frotz.get_state()

    @cached_property
    def world(self) -> World:
        return World(Game.load(str(self._path.with_suffix(".json"))))

    def run(self, memory: Memory, command: str) -> tuple[str, Memory]:
        """The game's output, and its memory after the command."""
        with self._guard:
            self._frotz.set_state(memory)
            return self._frotz.step(command)[0], self._frotz.get_state()


class Stories:
    """Caches of recently loaded games and of the first states of recent tasks."""

    def __init__(self, games: int = 256, starts: int = 256) -> None:
        self.story = lru_cache(games)(Story)
        self._size = starts
        self._starts: OrderedDict[str, Snapshot] = OrderedDict()

    def start(self, task: Task, begin: Callable[[Task], Snapshot]) -> Snapshot:
        """The task's first state, from `begin` unless it is cached."""
        found = self._starts.get(task.task_id)
        if found is None or found.task != task:
            found = self._starts[task.task_id] = begin(task)
        self._starts.move_to_end(task.task_id)
        if len(self._starts) > self._size:
            self._starts.popitem(last=False)
        return found
