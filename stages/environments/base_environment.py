"""Environments whose whole state is one small immutable value: what they share, so that a new one writes its rules alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from stages.environments.protocol import Observation, Step
from stages.records.task import Task


class State(Protocol):
    """Everything that changes while a task is played; a frozen dataclass."""

    @property
    def task_id(self) -> str: ...

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        ...


S = TypeVar("S", bound=State)


class ValueEnvironment(Generic[S]):
    """One running task. A subclass writes `_start`, `step` (which asks `_running` first), `state_key`, `admissible` and
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
        """Get ready for `task`: its first state, and what the agent reads beyond the prompt."""

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
        """The present state. Raises RuntimeError if no action can be taken in it."""
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
class AnswerState:
    """What changes in every environment that ends with an answer."""

    task_id: str
    turns: int = 0
    answer: str | None = None
    truncated: bool = False

    @property
    def over(self) -> bool:
        return self.answer is not None or self.truncated


A = TypeVar("A", bound=AnswerState)


class AnsweringEnvironment(ValueEnvironment[A]):
    """Tools, as often as wanted or never, then `answer <text>`. A subclass writes `_tools` and `_graded` in place of `step`."""

    usage: ClassVar[str]
    """What the agent reads after an action that is none."""
    answered: ClassVar[str] = "Answered."

    @abstractmethod
    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        """Verb -> what it does with the words after it: the step, or None if they make no sense."""

    @abstractmethod
    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """The last step's reward and the episode's terms, for an answer or for none."""

    def step(self, action: str) -> Step:
        self._state = replace(self._running(), turns=self._running().turns + 1)
        verb, _, argument = action.strip().partition(" ")
        verb, argument = verb.lower(), argument.strip()
        if verb == "answer" and argument:
            self._state = replace(self._state, answer=argument)
            reward, terms = self._graded(argument)
            return Step(Observation(self.answered), reward, accepted=True, terminated=True, truncated=False, terms=terms)
        tool = self._tools().get(verb)
        step = tool(argument) if tool and argument else None
        if step is None:
            step = Step(Observation(self.usage), 0.0, accepted=False, terminated=False, truncated=False)
        if self._state.turns < self._max_turns:
            return step
        self._state = replace(self._state, truncated=True)
        return replace(step, truncated=True, terms=self._graded(None)[1])

    def _key(self, done: str, normalize: Callable[[str], str]) -> str:
        """A state key of what was `done`, and of the normalised answer if one was given."""
        answer: Any = self._state.answer
        return f"{self.task.task_id}#{done}" + ("" if answer is None else f"#{normalize(answer)}")
