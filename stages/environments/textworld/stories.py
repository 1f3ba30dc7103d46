"""Loaded games, shared by all environments of a domain: interpreters, the games' logic, and the first states of tasks.

Loading a game takes as long as several steps, but copying an interpreter's memory, stack and registers in and out takes a tenth
of a step. So one interpreter per game serves all episodes, and a command is not run twice from the same memory.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jericho
import numpy as np
from textworld.generator.game import Game

from stages.environments.textworld.world import World
from stages.records.task import Task
from stages.runtime import spans

if TYPE_CHECKING:
    from stages.environments.textworld.environment import Snapshot

_SEED = 1234
Memory = tuple[Any, ...]
"""An interpreter's memory and stack as compressed differences from the game's first state (about 1 kB), and its registers."""


class Transitions:
    """An LRU cache of commands' results for all games of a process: a result depends only on the memory and the command."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.size, self.hits, self.misses = size, 0, 0
        self._known: OrderedDict[tuple[Path, Memory, str], tuple[str, Memory]] = OrderedDict()

    def get(self, key: tuple[Path, Memory, str], run: Callable[[], tuple[str, Memory]]) -> tuple[str, Memory]:
        found = self._known.get(key)
        if found is not None:
            self.hits += 1
            spans.count("environment_hits")
            self._known.move_to_end(key)
            return found
        self.misses += 1
        found = self._known[key] = run()
        if len(self._known) > self.size:
            self._known.popitem(last=False)
        return found


class Story:
    """One compiled game."""

    def __init__(self, path: Path, transitions: Transitions | None = None) -> None:
        """Raises FileNotFoundError for a missing game."""
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; run the curate stage to build the games")
        self._path = path
        self._frotz = jericho.FrotzEnv(str(path), _SEED)
        self._frotz.step("tw-trace-actions")
        self._guard = threading.Lock()
        self._transitions = transitions if transitions is not None else Transitions(0)
        self._start = self._frotz.get_state()
        self.first = self._pack(self._start)

    @cached_property
    def world(self) -> World:
        return World(Game.load(str(self._path.with_suffix(".json"))))

    def run(self, memory: Memory, command: str) -> tuple[str, Memory]:
        """What the game prints, and its memory after the command."""
        with self._guard:
            return self._transitions.get((self._path, memory, command), lambda: self._play(memory, command))

    def _play(self, memory: Memory, command: str) -> tuple[str, Memory]:
        self._frotz.set_state(self._unpack(memory))
        return self._frotz.step(command)[0], self._pack(self._frotz.get_state())

    def _pack(self, state: tuple[Any, ...]) -> Memory:
        changed = (np.bitwise_xor(now, then).tobytes() for now, then in zip(state[:2], self._start[:2], strict=True))
        return *(zlib.compress(part, 1) for part in changed), *state[2:]

    def _unpack(self, memory: Memory) -> tuple[Any, ...]:
        changed = (np.frombuffer(zlib.decompress(part), np.uint8) for part in memory[:2])
        return *(np.bitwise_xor(part, then) for part, then in zip(changed, self._start[:2], strict=True)), *memory[2:]


class Stories:
    """Caches of recently loaded games and of the first states of recent tasks."""

    def __init__(self, games: int = 256, starts: int = 256) -> None:
        self.transitions = Transitions()
        self.story = lru_cache(games)(lambda path: Story(path, self.transitions))
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
