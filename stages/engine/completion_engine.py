"""An engine over back ends that manage their own key/value cache: here a session is just its tokens.

Each turn sends the session's tokens from the start; back ends with a prefix cache (vLLM, SGLang, llama.cpp) compute only the new
ones, so a group's shared prompt, forks and earlier turns cost no more than in the torch engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stages.engine.engine import EngineError, Pause, Sampling, Turn, check_growth, check_length, check_prefix, idle
from stages.runtime import spans


@dataclass(frozen=True)
class TurnRequest:
    """One turn to sample after `token_ids`; `sampling.max_tokens` never exceeds the session's room."""

    session: int
    token_ids: tuple[int, ...]
    key: int
    sampling: Sampling


@dataclass(frozen=True)
class TurnResult:
    """A completed `TurnRequest`. `token_ids` ends with the end-of-turn token if `stopped`; log-probs as in `Turn`."""

    session: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


class Backend(Protocol):
    """Completes many token sequences at once. Raises EngineError for unsupported requests and incomplete results, OSError for
    outside failures."""

    def start(self, request: TurnRequest) -> None:
        """Begin one completion."""
        ...

    def wait(self, pause: Pause | None = None) -> list[TurnResult]:
        """Wait until a started completion is done or `pause` returns True; return all that are done."""
        ...

    def cancel(self, sessions: Collection[int]) -> None:
        """Abandon these sessions' completions; they may be started again."""
        ...

    def close(self) -> None:
        """Release resources: connections, a GPU's memory."""
        ...


@dataclass
class _Session:
    token_ids: list[int]
    key: int = 0
    sampling: Sampling | None = None
    """None between turns."""


class CompletionEngine:
    """An `Engine` over a `Backend`. max_length: longest session in tokens.

    If `advance` raises, unfinished turns stay requested and start again in the next call, which also returns finished ones.
    """

    def __init__(self, backend: Backend, max_length: int) -> None:
        self.backend, self.max_length = backend, max_length
        self._sessions: dict[int, _Session] = {}
        self._waiting: list[int] = []
        self._running: set[int] = set()
        self._finished: list[Turn] = []
        """Turns not yet returned by `advance`."""
        self._next_id = 0
        self._counters = {"sampled_tokens": 0, "fed_tokens": 0, "forked_tokens": 0, "requests": 0}

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def open(self, token_ids: Sequence[int], prefix: tuple[int, ...] | None = None) -> int:
        """See `Engine.open`. Raises ValueError if the session would be empty or longer than max_length."""
        tokens = [*(prefix or ()), *token_ids]
        check_length(len(tokens), self.max_length)
        number = self._next_id
        self._next_id += 1
        self._sessions[number] = _Session(tokens)
        self._counters["fed_tokens"] += len(token_ids)
        spans.count("fed_tokens", len(token_ids))
        self._counters["forked_tokens"] += len(prefix or ())
        return number

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        """See `Engine.extend`. Raises ValueError if the session would be longer than max_length."""
        state = idle(self._sessions, session)
        check_growth(session, len(state.token_ids), len(token_ids), self.max_length)
        state.token_ids.extend(token_ids)
        self._counters["fed_tokens"] += len(token_ids)
        spans.count("fed_tokens", len(token_ids))

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        """See `Engine.request`. Raises EngineError if entropies, kept tokens or a mask are requested."""
        if sampling.mask is not None:
            raise EngineError("this engine can't mask tokens (Sampling.mask); set resources.engine.kind to torch")
        if sampling.candidates:
            raise EngineError("this engine returns no entropies (Sampling.candidates); set resources.engine.kind to torch")
        if sampling.kept and sampling.restricted:
            raise EngineError(
                "this engine does not return the tokens that top-k and top-p leave (Sampling.kept); set resources.engine.kind to "
                "torch"
            )
        state = idle(self._sessions, session)
        state.key, state.sampling = key, sampling
        self._waiting.append(session)

    @spans.span("engine")
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
            # Only the back end could know which results were lost: restart all that were running.
            running, self._running = sorted(self._running), set()
            self._waiting = [*running, *self._waiting]
            self.backend.cancel(running)
            raise

    def snapshot(self, session: int, length: int | None = None) -> tuple[int, ...]:
        tokens = idle(self._sessions, session).token_ids
        check_prefix(session, len(tokens), length)
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

    def _begin(self, session: int) -> None:
        """Start a waiting turn, or finish it at once if the session has no room for it."""
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
        """Record the finished turn, unless its session was closed meanwhile."""
        if result.session not in self._running:
            return
        self._running.remove(result.session)
        state = self._sessions[result.session]
        assert state.sampling is not None
        room_ends = self.max_length - len(state.token_ids) <= state.sampling.max_tokens
        state.token_ids.extend(result.token_ids)
        state.sampling = None
        self._counters["sampled_tokens"] += len(result.token_ids)
        spans.count("sampled_tokens", len(result.token_ids))
        reason = "stop" if result.stopped else ("context" if room_ends else "length")
        self._finished.append(Turn(result.session, result.token_ids, result.logprobs, reason))
