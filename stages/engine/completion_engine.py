"""Sessions for back ends that keep the key/value cache to themselves: here a session is its tokens.

`CompletionEngine` is an `Engine` over a `Backend` that completes token sequences. Each turn sends the whole session;
back ends with a prefix cache (vLLM, SGLang, llama.cpp) compute the new tokens alone, so a group's shared prompt, forks and
earlier turns cost no more than they do in the torch engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stages.engine.engine import EngineError, Pause, Sampling, Turn


@dataclass(frozen=True)
class TurnRequest:
    """One turn to sample after `token_ids`; `sampling.max_tokens` is no more than the session has room for."""

    session: int
    token_ids: tuple[int, ...]
    key: int
    sampling: Sampling


@dataclass(frozen=True)
class TurnResult:
    """What came back. `token_ids` ends with the end-of-turn token if `stopped`; log-probs are those of `Engine`'s contract."""

    session: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


class Backend(Protocol):
    """Completes token sequences, many at once. What is refused or left out raises EngineError; what fails from outside,
    OSError."""

    def start(self, request: TurnRequest) -> None:
        """Begin one completion."""
        ...

    def wait(self, pause: Pause | None = None) -> list[TurnResult]:
        """Wait until at least one of those begun is done, or until `pause` says so; all that are done by then."""
        ...

    def cancel(self, sessions: Collection[int]) -> None:
        """Give up the completions begun for these sessions: their results are dropped. They may be begun again."""
        ...

    def close(self) -> None:
        """Give up what it holds: connections, a GPU's memory."""
        ...


@dataclass
class _Session:
    token_ids: list[int]
    key: int = 0
    sampling: Sampling | None = None
    """None between turns."""


class CompletionEngine:
    """See `stages.engine.engine.Engine`. max_length: longest session in tokens.

    When `advance` raises, requested turns stay requested, and the next call begins them again; those that are finished it
    returns.
    """

    def __init__(self, backend: Backend, max_length: int) -> None:
        self.backend, self.max_length = backend, max_length
        self._sessions: dict[int, _Session] = {}
        self._waiting: list[int] = []
        self._running: set[int] = set()
        self._finished: list[Turn] = []
        """Turns that no call has returned yet."""
        self._next_id = 0
        self._counters = {"sampled_tokens": 0, "fed_tokens": 0, "forked_tokens": 0, "requests": 0}

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def open(self, token_ids: Sequence[int], prefix: tuple[int, ...] | None = None) -> int:
        """See `Engine.open`. Raises ValueError if the session would be empty or longer than max_length."""
        tokens = [*(prefix or ()), *token_ids]
        if not tokens or len(tokens) > self.max_length:
            raise ValueError(f"a session of {len(tokens)} tokens; it needs at least 1 and at most max_length = {self.max_length}")
        number = self._next_id
        self._next_id += 1
        self._sessions[number] = _Session(tokens)
        self._counters["fed_tokens"] += len(token_ids)
        self._counters["forked_tokens"] += len(prefix or ())
        return number

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        """See `Engine.extend`. Raises ValueError if the session would be longer than max_length."""
        state = self._idle(session)
        if len(state.token_ids) + len(token_ids) > self.max_length:
            raise ValueError(
                f"session {session} has {len(state.token_ids)} tokens; {len(token_ids)} more pass max_length = {self.max_length}"
            )
        state.token_ids.extend(token_ids)
        self._counters["fed_tokens"] += len(token_ids)

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        """See `Engine.request`. Raises EngineError where entropies are requested."""
        if sampling.candidates:
            raise EngineError("this engine's back end gives no entropies (Sampling.candidates); use resources.engine kind: torch")
        state = self._idle(session)
        state.key, state.sampling = key, sampling
        self._waiting.append(session)

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        while self._waiting:
            self._begin(self._waiting[0])
            del self._waiting[0]
        while self._running and not self._finished and not (pause and pause()):
            for result in self._wait(pause):
                self._end(result)
        turns, self._finished = self._finished, []
        return sorted(turns, key=lambda turn: turn.session)

    def _wait(self, pause: Pause | None) -> list[TurnResult]:
        try:
            return self.backend.wait(pause)
        except BaseException:
            # Which results are lost, only the back end could know: all that run are begun again.
            running, self._running = sorted(self._running), set()
            self._waiting = [*running, *self._waiting]
            self.backend.cancel(running)
            raise

    def snapshot(self, session: int, length: int | None = None) -> tuple[int, ...]:
        tokens = self._idle(session).token_ids
        if length is not None and not 0 < length <= len(tokens):
            raise ValueError(f"session {session} has {len(tokens)} tokens; a copy of its first {length} is not to be had")
        return tuple(tokens[:length])

    def fork(self, session: int, count: int) -> list[int]:
        prefix = self.snapshot(session)
        return [self.open((), prefix) for _ in range(count)]

    def close(self, session: int) -> None:
        del self._sessions[session]
        self._finished = [turn for turn in self._finished if turn.session != session]
        if session in self._waiting:
            self._waiting.remove(session)
        if session in self._running:
            self._running.remove(session)
            self.backend.cancel([session])

    def _idle(self, session: int) -> _Session:
        state = self._sessions[session]
        if state.sampling is not None:
            raise RuntimeError(f"session {session} is in the middle of a turn; wait until advance() returns it")
        return state

    def _begin(self, session: int) -> None:
        """Send a waiting turn off; where there is no room for one, it is finished."""
        state = self._sessions[session]
        assert state.sampling is not None
        room = self.max_length - len(state.token_ids)
        if room < 1:
            state.sampling = None
            self._finished.append(Turn(session, (), (), "context"))
            return
        limited = replace(state.sampling, max_tokens=min(room, state.sampling.max_tokens))
        self.backend.start(TurnRequest(session, tuple(state.token_ids), state.key, limited))
        self._running.add(session)
        self._counters["requests"] += 1

    def _end(self, result: TurnResult) -> None:
        """Note the turn that a result finishes, unless its session was closed meanwhile."""
        if result.session not in self._running:
            return
        self._running.remove(result.session)
        state = self._sessions[result.session]
        assert state.sampling is not None
        room_ends = self.max_length - len(state.token_ids) <= state.sampling.max_tokens
        state.token_ids.extend(result.token_ids)
        state.sampling = None
        self._counters["sampled_tokens"] += len(result.token_ids)
        reason = "stop" if result.stopped else ("context" if room_ends else "length")
        self._finished.append(Turn(result.session, result.token_ids, result.logprobs, reason))
