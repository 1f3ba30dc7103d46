"""One running TextWorld game: the compiled story in the Frotz interpreter, and the facts that it makes true."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_NOT_RUNNING = "no episode is running: call reset(task) first"


@dataclass(frozen=True)
class Snapshot:
    """Everything that changes while an episode runs."""

    task: Task
    memory: Memory
    state: WorldState
    history: tuple[Action, ...]
    turn: int
    done: bool
    potential: float
    text: str


class TextWorldEnvironment:
    """Plays the games below `folder`. Commands are free text; those that change nothing in the game's rules are refused.

    A refused command leaves the game exactly as it was. Only single commands of the game's own verbs reach the interpreter:
    `undo`, `restart`, `save`, chains ("go east then ...") and the like are not verbs here.
    """

    def __init__(self, folder: Path, settings: TextWorldSettings, stories: Stories | None = None) -> None:
        self.folder = Path(folder)
        self.settings = settings
        self._stories = stories if stories is not None else Stories(1, 1)
        self._now: Snapshot | None = None
        self._planner: Planner | None = None

    def reset(self, task: Task) -> Observation:
        """Start `task`. Raises FileNotFoundError if its game was not built below the folder."""
        self._now = self._stories.start(task, self._begin)
        return Observation(self._now.text)

    def step(self, action: str) -> Step:
        now = self._running()
        if now.done:
            raise RuntimeError(f"the episode of {now.task.task_id} is over: call reset(task) or restore(state)")
        raw, accepted, memory, state, history = self._play(action, now)
        won, lost = WON in raw and accepted, LOST in raw and accepted
        turn = now.turn + 1
        truncated = not (won or lost) and turn >= self.settings.max_turns
        potential = 1.0 if won else 0.0 if lost else self._potential(now.task, state, history)
        share = self.settings.progress_reward
        reward = share * (potential - now.potential) + (1.0 - share) * won
        self._now = Snapshot(
            task=now.task,
            memory=memory,
            state=state,
            history=history,
            turn=turn,
            done=won or lost or truncated,
            potential=potential,
            text="",
        )
        text = self._shown(compact(raw), state, self._now.done)
        self._now = replace(self._now, text=text)
        return Step(Observation(text), reward, accepted, won or lost, truncated, cost=1.0, terms={"won": float(won)})

    def snapshot(self) -> Snapshot:
        return self._running()

    def restore(self, state: Snapshot) -> None:
        """Go back to `state`, also from another task or in a new environment of the same folder and settings."""
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
        """Commands that win from here; empty if the episode is over or the game can't be won any more."""
        now = self._running()
        return [] if now.done else self._plan(now.state, now.history)

    def close(self) -> None:
        self._now = self._planner = None

    def _running(self) -> Snapshot:
        if self._now is None:
            raise RuntimeError(_NOT_RUNNING)
        return self._now

    def _story(self, task: Task) -> Story:
        return self._stories.story(self.folder / str(task.spec["game"]))

    def _begin(self, task: Task) -> Snapshot:
        """The task's first moment: the walk to its start is done, the room and what the agent carries are described."""
        story = self._story(task)
        memory, state, history = story.first, story.world.initial(), ()
        for move in task.spec["moves"]:
            raw, memory = story.run(memory, move)
            followed = state.follow(succeeded_events(raw))
            if followed is None or not followed[1]:
                raise ValueError(f"task {task.task_id}: '{move}' on the way to its start does nothing in {task.spec['game']}")
            state, history = followed[0], (*history, *followed[1])
        raw, memory = story.run(memory, "look")
        text = compact(raw)
        if any(fact.name == "in" and fact.arguments[1].name == "I" for fact in state.facts.facts):
            raw, memory = story.run(memory, "inventory")
            text = f"{text} {compact(raw)}"
        return Snapshot(
            task=task,
            memory=memory,
            state=state,
            history=history,
            turn=0,
            done=False,
            potential=0.0,
            text=self._shown(text, state, done=False),
        )

    def _play(self, action: str, now: Snapshot) -> tuple[str, bool, Memory, WorldState, tuple[Action, ...]]:
        """What the game prints, whether it did anything, and memory, facts and history after it."""
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
        """How near the goal is, in [0, 1]: 0 at the start's distance or farther, 1 when won (Ng et al., 1999)."""
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
