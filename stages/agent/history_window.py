"""A history window: an engine whose model sees the opening and the newest turns alone.

It stands between whoever plays and a real engine, so that rollouts know nothing of it: an episode keeps all its tokens, and their
log-probabilities are those given what the model saw. A turn and what answered it go together; nothing is tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.engine.engine import Engine, Pause, Sampling, Turn


@dataclass
class _Session:
    """One session as its caller knows it. `inner`: the engine's own, which lacks the first `dropped` exchanges."""

    inner: int
    opening: list[int]
    exchanges: list[list[int]] = field(default_factory=list)
    """Each a turn's tokens and what followed until the next one."""
    dropped: int = 0

    @property
    def newest(self) -> list[int]:
        """What new tokens are appended to."""
        return self.exchanges[-1] if self.exchanges else self.opening

    def visible(self) -> list[int]:
        return [*self.opening, *(token for exchange in self.exchanges[self.dropped :] for token in exchange)]

    def copy(self, inner: int) -> _Session:
        return _Session(inner, list(self.opening), [list(one) for one in self.exchanges], self.dropped)


class WindowEngine:
    """`stages.engine.engine.Engine` over another one; the model sees `window` exchanges at most. Raises ValueError for fewer than
    one."""

    def __init__(self, engine: Engine, window: int) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} turns; at least the newest must be seen")
        self.engine, self.window = engine, window
        self._sessions: dict[int, _Session] = {}
        self._of: dict[int, int] = {}
        """Inner session -> the caller's, while a turn is asked for."""
        self._next = 0
        self._cuts = 0

    @property
    def counters(self) -> dict[str, int]:
        """The engine's, and how often a session's oldest turns were cut off (`cuts`)."""
        return {**self.engine.counters, "cuts": self._cuts}

    def _add(self, session: _Session) -> int:
        self._sessions[self._next] = session
        self._next += 1
        return self._next - 1

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        if prefix is None:
            return self._add(_Session(self.engine.open(token_ids), list(token_ids)))
        held, inner = prefix
        session = held.copy(self.engine.open(token_ids, inner))
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
            opening = self.engine.snapshot(state.inner, len(state.opening))
            self.engine.close(state.inner)
            state.inner = self.engine.open(state.visible()[len(state.opening) :], opening)
            self._cuts += 1
        self._of[state.inner] = session
        self.engine.request(state.inner, key, sampling)

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        turns = []
        for turn in self.engine.advance(pause):
            session = self._of.pop(turn.session)
            self._sessions[session].exchanges.append(list(turn.token_ids))
            turns.append(Turn(session, turn.token_ids, turn.logprobs, turn.stop_reason, turn.entropies))
        return sorted(turns, key=lambda turn: turn.session)

    def snapshot(self, session: int, length: int | None = None) -> Any:
        """See `Engine.snapshot`. Raises ValueError for a part of a session (branches within an episode): what the model saw there
        may be gone."""
        state = self._sessions[session]
        if length is not None and length != len(state.opening) + sum(map(len, state.exchanges)):
            raise ValueError("a session with a history window can be copied only as a whole")
        return state.copy(state.inner), self.engine.snapshot(state.inner)

    def fork(self, session: int, count: int) -> list[int]:
        state = self._sessions[session]
        return [self._add(state.copy(inner)) for inner in self.engine.fork(state.inner, count)]

    def close(self, session: int) -> None:
        state = self._sessions.pop(session)
        self._of.pop(state.inner, None)
        self.engine.close(state.inner)
