"""Search with thoughts as actions, whose episodes record their spans for a format score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stages.environments.protocol import Observation, Step
from stages.environments.search.environment import SearchEnvironment, SearchState
from stages.environments.search.formats import Span
from stages.records.task import Task

GO_ON = "Go on."


@dataclass(frozen=True)
class SpanState(SearchState):
    spans: tuple[Span, ...] = ()
    """What was written so far, by whom it may be, in order."""


class SpanSearchEnvironment(SearchEnvironment):
    """A SearchEnvironment with `think <text>`, which changes nothing. think: whether that is an action; False for policies whose
    thoughts are part of a turn (model.thinking)."""

    _state: SpanState
    _think: bool

    def _start(self, task: Task) -> tuple[SearchState, str]:
        super()._start(task)
        return SpanState(task.task_id), ""

    def step(self, action: str) -> Step:
        self._running()
        step = super().step(action)
        if not step.accepted:
            self._add(Span("other", action.strip()))
        return step

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        return {**super()._tools(), **({"think": self._thought} if self._think else {})}

    def _add(self, *spans: Span) -> None:
        self._state = replace(self._state, spans=(*self._state.spans, *spans))

    def _thought(self, text: str) -> Step:
        self._add(Span("think", text))
        return Step(Observation(GO_ON), 0.0, accepted=True, terminated=False, truncated=False)

    def _written(self, answer: str | None) -> tuple[Span, ...]:
        """The episode's spans, with its answer if there is one."""
        return (*self._state.spans, *(() if answer is None else (Span("answer", answer),)))

    @property
    def _last_turn(self) -> bool:
        """Whether the turn being played is the last: a search then has no result any more."""
        return self._state.turns >= self._max_turns

    @property
    def _has_thought(self) -> bool:
        """Whether a thought was the last thing written."""
        return not self._think or (bool(self._state.spans) and self._state.spans[-1].kind == "think")
