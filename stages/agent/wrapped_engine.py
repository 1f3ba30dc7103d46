"""Base class of engines that wrap another engine and map their callers' sessions to its sessions."""

from __future__ import annotations

from typing import Generic, TypeVar

from stages.engine.engine import Engine

State = TypeVar("State")


class WrappedEngine(Generic[State]):
    """`_sessions`: state by the caller's session; `_outer`: inner session -> the caller's, while a turn is requested."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sessions: dict[int, State] = {}
        self._outer: dict[int, int] = {}
        self._next_id = 0

    def _add(self, state: State) -> int:
        self._sessions[self._next_id] = state
        self._next_id += 1
        return self._next_id - 1

    def _close_inner(self, inner: int) -> None:
        self._outer.pop(inner, None)
        self.engine.close(inner)
