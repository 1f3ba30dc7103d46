"""stages.engine.completion_engine: sessions over a back end that fails or whose requests are cancelled."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from stages.engine.checked_backend import CheckedBackend
from stages.engine.completion_engine import CompletionEngine, TurnRequest, TurnResult
from stages.engine.engine import EngineError, Pause, Sampling


class StubBackend:
    """Answers each completion with its session's number and a 3. `failing`: an exception that `wait` raises once."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.started: list[int] = []
        self.cancelled: list[int] = []
        self.failing: Exception | None = None

    def start(self, request: TurnRequest) -> None:
        if 99 in request.token_ids:
            raise EngineError("99 is no token")
        self.running.append(request.session)
        self.started.append(request.session)

    def wait(self, pause: Pause | None = None) -> list[TurnResult]:
        if self.failing:
            error, self.failing = self.failing, None
            raise error
        session = self.running.pop(0)
        return [TurnResult(session, (session, 3), (-0.5, -0.5), stopped=True)]

    def cancel(self, sessions: Collection[int]) -> None:
        self.cancelled += sessions
        self.running = [session for session in self.running if session not in sessions]

    def close(self) -> None:
        return None


def engine_with(*prompts: list[int]) -> tuple[CompletionEngine, StubBackend]:
    backend = StubBackend()
    engine = CompletionEngine(backend, max_length=32)
    for prompt in prompts:
        engine.request(engine.open(prompt), 1, Sampling(max_tokens=4))
    return engine, backend


def finish(engine: CompletionEngine) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    while turns := engine.advance():
        found |= {turn.session: turn.token_ids for turn in turns}
    return found


def test_kept_tokens_are_refused_where_some_are_left_out() -> None:
    engine, _ = engine_with([5])
    session = engine.open([6])
    with pytest.raises(EngineError, match="does not return the tokens that top-k and top-p leave"):
        engine.request(session, 1, Sampling(top_k=5, kept=True))
    engine.request(session, 1, Sampling(kept=True))


def test_requests_in_flight_restart_after_wait_fails() -> None:
    """Contract: after a failed call every request still completes exactly once; the back end was told to cancel what was
    running."""
    engine, backend = engine_with([5], [6], [7])
    backend.failing = ConnectionError("the server is gone")
    with pytest.raises(ConnectionError):
        engine.advance()
    assert (backend.cancelled, backend.running) == ([0, 1, 2], [])
    assert finish(engine) == {0: (0, 3), 1: (1, 3), 2: (2, 3)}
    assert engine.counters["sampled_tokens"] == 6


def test_rejected_request_does_not_start_the_others_twice() -> None:
    engine, backend = engine_with([5], [99], [7])
    with pytest.raises(EngineError, match="99"):
        engine.advance()
    engine.close(1)
    assert finish(engine) == {0: (0, 3), 2: (2, 3)}
    assert backend.started == [0, 2]


def test_turn_without_room_survives_rejection_of_another() -> None:
    engine, _ = engine_with([5] * 32, [99])
    with pytest.raises(EngineError, match="99"):
        engine.advance()
    engine.close(1)
    assert [(turn.session, turn.stop_reason) for turn in engine.advance()] == [(0, "context")]


def test_closing_a_session_cancels_its_request() -> None:
    """Contract: the back end stops working on a closed session."""
    engine, backend = engine_with([5], [6], [7])
    assert [turn.session for turn in engine.advance()] == [0]
    engine.close(1)
    assert backend.cancelled == [1]
    assert finish(engine) == {2: (2, 3)}


def test_back_end_that_fails_the_check_stays_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a retry after a failed check fails again."""
    monkeypatch.setattr("stages.engine.checked_backend.sampled_logprobs", lambda *_: [-9.0, -9.0])
    model: Any = object()
    engine = CompletionEngine(CheckedBackend(StubBackend(), lambda: model, 1, "float32"), max_length=32)
    engine.request(engine.open([5]), 1, Sampling(max_tokens=4))
    for _ in range(2):
        with pytest.raises(EngineError, match=r"differ .* by 8\.5 nats"):
            engine.advance()
