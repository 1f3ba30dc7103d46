"""Plays one TextWorld game: the compiled story in the Frotz interpreter, and the facts in TextWorld's logic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from textworld.logic import Action

from stages.environments.protocol import Observation, Step
from stages.environments.textworld.settings import TextWorldSettings
from stages.environments.textworld.stories import Memory, Stories, Story
from stages.environments.textworld.text import LOST, WON, compact, succeeded_events
from stages.environments.textworld.world import Planner, WorldState
from stages.records.task import Task

_VERBS = {"close", "drop", "eat", "examine", "get", "go", "insert", "inventory", "lock", "look", "open", "pick", "put", "take"}
_VERBS |= {"unlock", "north", "south", "east", "west", "n", "s", "e", "w", "i", "l", "x"}
_COMMAND = re.compile(r"[a-z0-9 -]{1,80}")
_CHAINED = re.compile(r"\bthen\b")
_UNKNOWN = "that's not a verb i recognise."


@dataclass(frozen=True)
class Snapshot:
    """The state of an episode."""

    task: Task
    memory: Memory
    state: WorldState
    history: tuple[Action, ...]
    turn: int
    done: bool
    potential: float
    text: str


class TextWorldEnvironment:
    """Plays the games below `folder`. Commands are free text; those that change no fact are refused and leave the game as it was.

    Only single commands with known verbs reach the interpreter: not `undo`, `restart`, `save` or chains ("go east then ...").
    """

    def __init__(self, folder: Path, settings: TextWorldSettings, stories: Stories | None = None) -> None:
        self.folder = Path(folder)
        self.settings = settings
        self._stories = stories if stories is not None else Stories(1, 1)
        self._now: Snapshot | None = None
        self._planner: Planner | None = None

    def reset(self, task: Task) -> Observation:
        """Start `task`. Raises FileNotFoundError if its game was not built."""
        self._now = self._stories.start(task, self._begin)
        return Observation(self._now.text)

    def step(self, action: str) -> Step:
        now = self._running()
        if now.done:
            raise RuntimeError(f"the episode of {now.task.task_id} is over; call reset(task) or restore(state)")
        raw, accepted, memory, state, history = self._play(action, now)
        won, lost = WON in raw and accepted, LOST in raw and accepted
        turn = now.turn + 1
        truncated = not (won or lost) and turn >= self.settings.max_turns
        potential = 1.0 if won else 0.0 if lost else self._potential(now.task, state, history)
        share = self.settings.progress_reward
        reward = share * (potential - now.potential) + (1.0 - share) * won
        done = won or lost or truncated
        text = self._shown(compact(raw), state, done)
        self._now = Snapshot(now.task, memory, state, history, turn, done, potential, text)
        return Step(Observation(text), reward, accepted, won or lost, truncated, cost=1.0, terms={"won": float(won)})

    def snapshot(self) -> Snapshot:
        return self._running()

    def restore(self, state: Snapshot) -> None:
        """Go back to `state`, even of another task or of another environment with the same folder and settings."""
        self._now = state

    def state_key(self) -> str:
        now = self._running()
        return f"{now.task.cluster}:{now.state.key}"

    def admissible(self) -> Sequence[str]:
        now = self._running()
        if now.done:
            return ()
        return self._admissible(now.state)

    def policy(self) -> list[str]:
        """Commands that win from here; empty if the episode is over or the game can no longer be won."""
        now = self._running()
        return [] if now.done else self._plan(now.state, now.history)

    def close(self) -> None:
        self._now = self._planner = None

    def _running(self) -> Snapshot:
        if self._now is None:
            raise RuntimeError("no episode is running; call reset(task) first")
        return self._now

    def _story(self, task: Task) -> Story:
        return self._stories.story(self.folder / str(task.spec["game"]))

    def _begin(self, task: Task) -> Snapshot:
        """The task's first state: after the walk to its start, with a description of the room and the inventory."""
        story = self._story(task)
        memory, state, history = story.first, story.world.initial(), ()
        for move in task.spec["moves"]:
            raw, memory = story.run(memory, move)
            followed = state.follow(succeeded_events(raw))
            if followed is None or not followed[1]:
                raise ValueError(f"task {task.task_id}: '{move}' on the walk to its start does nothing in {task.spec['game']}")
            state, history = followed[0], (*history, *followed[1])
        raw, memory = story.run(memory, "look")
        text = compact(raw)
        if any(fact.name == "in" and fact.arguments[1].name == "I" for fact in state.facts.facts):
            raw, memory = story.run(memory, "inventory")
            text = f"{text} {compact(raw)}"
        return Snapshot(task, memory, state, history, 0, False, 0.0, self._shown(text, state, done=False))

    def _play(self, action: str, now: Snapshot) -> tuple[str, bool, Memory, WorldState, tuple[Action, ...]]:
        """The game's output, whether the command was accepted, and memory, facts and history after it."""
        command = " ".join(action.lower().split())
        words = command.split(" ")
        if words[0] not in _VERBS or not _COMMAND.fullmatch(command) or _CHAINED.search(command):
            return _UNKNOWN, False, now.memory, now.state, now.history
        raw, memory = self._story(now.task).run(now.memory, command)
        events = succeeded_events(raw)
        followed = now.state.follow(events)
        if followed is None or not events:
            return raw, False, now.memory, now.state, now.history
        state, done = followed
        return raw, True, memory, state, (*now.history, *done)

    def _plan(self, state: WorldState, history: tuple[Action, ...]) -> list[str]:
        if self._planner is None or self._planner.world is not state.world:
            self._planner = Planner(state.world)
        return self._planner.policy(history)

    def _potential(self, task: Task, state: WorldState, history: tuple[Action, ...]) -> float:
        """Progress in [0, 1]: 0 at the start's distance or farther, 1 when won (Ng et al., 1999)."""
        if not self.settings.progress_reward:
            return 0.0
        left = len(self._plan(state, history))
        return max(0.0, 1.0 - left / task.difficulty) if left else 0.0

    def _admissible(self, state: WorldState) -> Sequence[str]:
        if self.settings.idle_commands:
            return tuple(sorted((*state.commands, *state.idle_commands)))
        return state.commands

    def _shown(self, text: str, state: WorldState, done: bool) -> str:
        if done or not self.settings.show_admissible:
            return text
        return f"{text} commands: {'; '.join(self._admissible(state))}."
