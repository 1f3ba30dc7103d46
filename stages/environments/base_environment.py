"""Base classes for environments whose whole state is one small immutable value, so that a subclass writes only its rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Protocol, TypeVar

from stages.environments.protocol import Observation, Step
from stages.records.task import Task


class State(Protocol):
    """Everything that changes during an episode; a frozen dataclass."""

    @property
    def task_id(self) -> str: ...

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        ...


S = TypeVar("S", bound=State)


class ValueEnvironment(ABC, Generic[S]):
    """One running task. A subclass writes `_start`, `step` (which begins with `_running`), `state_key`, `admissible` and
    `next_action`; see stages.environments.protocol.Environment."""

    name: ClassVar[str]
    _state: S

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._task: Task | None = None

    @property
    def task(self) -> Task:
        """The task being played. Raises RuntimeError before the first reset."""
        if self._task is None:
            raise RuntimeError(f"the {self.name} environment was never reset; call reset(task) first")
        return self._task

    @abstractmethod
    def _start(self, task: Task) -> tuple[S, str]:
        """The first state of `task`, and what the agent reads after the prompt."""

    def reset(self, task: Task) -> Observation:
        state, text = self._start(task)
        self._task, self._state = task, state
        return Observation(text)

    @abstractmethod
    def step(self, action: str) -> Step: ...

    @abstractmethod
    def next_action(self) -> str | None:
        """The expert's next action; None once the episode is over."""

    def _running(self) -> S:
        """The current state. Raises RuntimeError unless an episode is running."""
        if self._task is None or self._state.over:
            raise RuntimeError(
                f"the {self.name} episode is over or was never reset; call reset(task) or restore(state) before step()"
            )
        return self._state

    def snapshot(self) -> S:
        if self._task is None:
            raise RuntimeError(f"the {self.name} environment was never reset; call reset(task) before snapshot()")
        return self._state

    def restore(self, state: S) -> None:
        """Raises ValueError for a snapshot of another task."""
        if state.task_id != self.task.task_id:
            raise ValueError(f"snapshot of task {state.task_id} can't be restored into task {self.task.task_id}; reset first")
        self._state = state

    @abstractmethod
    def state_key(self) -> str: ...

    @abstractmethod
    def admissible(self) -> Sequence[str]: ...

    def close(self) -> None:
        self._task = None


@dataclass(frozen=True)
class EpisodeState:
    """The fields that every state of an `EpisodeEnvironment` has."""

    task_id: str
    turns: int = 0
    terminated: bool = False
    truncated: bool = False

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


E = TypeVar("E", bound=EpisodeState)


class EpisodeEnvironment(ValueEnvironment[E]):
    """Counts turns and stops experts at the end. A subclass writes `_start`, `step` (which ends with `_end_turn`), `state_key`,
    `_actions` and `_expert_action`."""

    @abstractmethod
    def _actions(self) -> Iterable[str]:
        """Actions that would be accepted now, or a sample of them, in any order; the episode is running."""

    @abstractmethod
    def _expert_action(self) -> str | None:
        """The expert's next action; the episode is running."""

    def admissible(self) -> Sequence[str]:
        """`_actions`, sorted; empty once the episode is over."""
        return [] if self._state.over else sorted(set(self._actions()))

    def next_action(self) -> str | None:
        return None if self._state.over else self._expert_action()

    def _end_turn(self, after: E) -> E:
        """Make `after` the state, with one more turn, truncated if that was the last one."""
        turns = self._state.turns + 1
        self._state = replace(after, turns=turns, truncated=not after.terminated and turns >= self._max_turns)
        return self._state


@dataclass(frozen=True)
class AnswerState(EpisodeState):
    """The state of an `AnsweringEnvironment`."""

    answer: str | None = None


A = TypeVar("A", bound=AnswerState)


class AnsweringEnvironment(EpisodeEnvironment[A]):
    """Any number of tool calls, then `answer <text>`. A subclass writes `_tools` and `_graded` in place of `step`."""

    usage: ClassVar[str]
    """What the agent reads after an invalid action."""
    answered: ClassVar[str] = "Answered."

    @abstractmethod
    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        """Verb -> function of the text after it: returns the step, or None if the text is invalid."""

    @abstractmethod
    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """Reward of the last step and reward terms of the episode, for an answer or for none."""

    def step(self, action: str) -> Step:
        turns = self._running().turns + 1
        self._state = replace(self._state, turns=turns)
        verb, _, argument = action.strip().partition(" ")
        verb, argument = verb.lower(), argument.strip()
        if verb == "answer" and argument:
            self._state = replace(self._state, answer=argument, terminated=True)
            reward, terms = self._graded(argument)
            return Step(Observation(self.answered), reward, accepted=True, terminated=True, truncated=False, terms=terms)
        tool = self._tools().get(verb)
        step = tool(argument) if tool and argument else None
        if step is None:
            step = Step(Observation(self.usage), 0.0, accepted=False, terminated=False, truncated=False)
        if turns < self._max_turns:
            return step
        self._state = replace(self._state, truncated=True)
        return replace(step, truncated=True, terms={**self._graded(None)[1], **step.terms})

    def _key(self, done: str, normalize: Callable[[str], str]) -> str:
        """A state key of the task, what was `done`, and the normalised answer if one was given."""
        answer = self._state.answer
        return f"{self.task.task_id}#{done}" + ("" if answer is None else f"#{normalize(answer)}")
