"""A history window: an engine wrapper with which the model sees only the opening and the newest turns.

Rollouts are unaware of it: an episode keeps all its tokens, with log-probabilities conditioned on what the model saw. A turn and
its answer are dropped together; nothing is tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stages.agent.forgetting import reopened
from stages.agent.wrapped_engine import WrappedEngine
from stages.engine.engine import Engine, Pause, Sampling, Turn


@dataclass
class _Session:
    """A caller's session. `inner`: the wrapped engine's session, which lacks the first `dropped` exchanges."""

    inner: int
    opening: list[int]
    exchanges: list[list[int]] = field(default_factory=list)
    """Each holds a turn's tokens and what follows until the next turn."""
    dropped: int = 0

    @property
    def newest(self) -> list[int]:
        """The tokens that new ones are appended to."""
        return self.exchanges[-1] if self.exchanges else self.opening

    def copy(self, inner: int) -> _Session:
        return _Session(inner, list(self.opening), [list(one) for one in self.exchanges], self.dropped)


class WindowEngine(WrappedEngine[_Session]):
    """An `Engine` over another one, whose model sees at most `window` exchanges. Raises ValueError for a window below 1."""

    def __init__(self, engine: Engine, window: int) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} turns; it must be at least 1")
        super().__init__(engine)
        self.window = window
        self._cuts = 0

    @property
    def counters(self) -> dict[str, int]:
        """The engine's, and how often a session's oldest turns were dropped (`cuts`)."""
        return {**self.engine.counters, "cuts": self._cuts}

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        if prefix is None:
            return self._add(_Session(self.engine.open(token_ids), list(token_ids)))
        copied, inner = prefix
        session = copied.copy(self.engine.open(token_ids, inner))
        session.newest.extend(token_ids)
        return self._add(session)

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        state = self._sessions[session]
        self.engine.extend(state.inner, token_ids)
        state.newest.extend(token_ids)

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        state = self._sessions[session]
        if len(state.exchanges) - state.dropped > self.window:
            state.dropped = len(state.exchanges) - self.window
            visible = [token for exchange in state.exchanges[state.dropped :] for token in exchange]
            state.inner = reopened(self.engine, state.inner, len(state.opening), visible)
            self._cuts += 1
        self._outer[state.inner] = session
        self.engine.request(state.inner, key, sampling)

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        turns = []
        for turn in self.engine.advance(pause):
            session = self._outer.pop(turn.session)
            self._sessions[session].exchanges.append(list(turn.token_ids))
            turns.append(replace(turn, session=session))
        return sorted(turns, key=lambda turn: turn.session)

    def snapshot(self, session: int, length: int | None = None) -> Any:
        """See `Engine.snapshot`. Raises ValueError for part of a session (branches within an episode), since the model may have
        seen other tokens there."""
        state = self._sessions[session]
        if length is not None and length != len(state.opening) + sum(map(len, state.exchanges)):
            raise ValueError("with a history window, only an entire session can be copied")
        return state.copy(state.inner), self.engine.snapshot(state.inner)

    def fork(self, session: int, count: int) -> list[int]:
        state = self._sessions[session]
        return [self._add(state.copy(inner)) for inner in self.engine.fork(state.inner, count)]

    def close(self, session: int) -> None:
        self._close_inner(self._sessions.pop(session).inner)
