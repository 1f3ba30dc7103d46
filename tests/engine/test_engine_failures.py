"""A call that raises, or a session closed in the middle of a turn, leaves the engine intact and other sessions unaffected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import make_tiny_model

from stages.engine.engine import Sampling
from stages.engine.forward import Pass
from stages.engine.torch_engine import TorchEngine

MAX_LENGTH = 96
When = Callable[[Pass], bool]
Turns = dict[int, tuple[tuple[int, ...], tuple[float, ...]]]


class Failing:
    """Forward pass that raises where `fails(batch)` is true; with `poison`, after writing NaN into the cache."""

    def __init__(self, engine: TorchEngine, fails: When, poison: bool = False) -> None:
        self.engine, self.inner, self.fails, self.poison = engine, engine._layers, fails, poison
        engine._layers = self

    def refresh(self) -> None:
        self.inner.refresh()

    def __call__(self, batch: Pass) -> torch.Tensor:
        if self.fails(batch):
            if self.poison:
                self.engine.cache.data[:, :, batch.targets, :, batch.positions] = float("nan")
            raise RuntimeError("out of memory")
        return self.inner(batch)


def once(when: When) -> When:
    left = [True]

    def fails(batch: Pass) -> bool:
        return when(batch) and bool(left) and left.pop()

    return fails


def is_prefill(batch: Pass) -> bool:
    return batch.ends is not None


def is_decode(batch: Pass) -> bool:
    return batch.ends is None


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_model(61)


def random_tokens(seed: int, count: int) -> list[int]:
    return torch.randint(4, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def open_sessions(engine: TorchEngine, count: int) -> list[int]:
    sessions = [engine.open(random_tokens(seed, 5 + 9 * seed)) for seed in range(count)]
    for seed, session in enumerate(sessions):
        engine.request(session, seed, Sampling(max_tokens=4 + 3 * (seed % 3)))
    return sessions


def finish(engine: TorchEngine, retries: int = 0) -> Turns:
    found: Turns = {}
    while True:
        try:
            turns = engine.advance()
        except RuntimeError:
            retries -= 1
            assert retries >= 0
            continue
        if not turns:
            return found
        found |= {turn.session: (turn.token_ids, turn.logprobs) for turn in turns}


def make_engine(model: Any, slots: int = 4, **settings: Any) -> TorchEngine:
    return TorchEngine(model, [], slots=slots, max_length=MAX_LENGTH, **settings)


@pytest.mark.parametrize("when", [is_prefill, is_decode])
def test_failed_call_can_be_retried(model: Any, when: When) -> None:
    """Contract: requests made before a failed call complete with the same tokens, and no turn is lost."""
    plain, engine = make_engine(model), make_engine(model)
    open_sessions(plain, 7)
    open_sessions(engine, 7)
    expected = finish(plain)
    Failing(engine, once(when))
    assert finish(engine, retries=1) == expected
    assert engine.counters["fed_tokens"] == plain.counters["fed_tokens"]


def test_failure_while_drawing_feeds_last_tokens_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: if drawing fails after the pass, the sessions' last tokens are fed again."""
    plain, engine = make_engine(model), make_engine(model)
    open_sessions(plain, 3)
    open_sessions(engine, 3)
    expected, draw = finish(plain), engine._draw

    def failing(*arguments: Any) -> Any:
        monkeypatch.setattr(engine, "_draw", draw)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "_draw", failing)
    found = finish(engine, retries=1)
    for session, (tokens, logprobs) in expected.items():
        assert found[session] == (tokens, pytest.approx(logprobs, abs=1e-6))


def test_finished_turn_survives_a_failed_call(model: Any) -> None:
    """Contract: a turn that ends in the call in which another one fails is returned by the next call."""
    engine = make_engine(model, batch_share=1.0)
    short, long = (engine.open(random_tokens(seed, 6)) for seed in (1, 2))
    engine.request(short, 1, Sampling(max_tokens=1))
    engine.request(long, 2, Sampling(max_tokens=5))
    Failing(engine, once(is_decode))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.advance()
    assert {turn.session for turn in engine.advance()} == {short, long}


@pytest.mark.parametrize("when", [is_prefill, is_decode])
def test_closing_sessions_after_a_failure_frees_their_slots(model: Any, when: When) -> None:
    """Contract: closing the sessions of a failed call frees every slot, and what the call left in the cache affects no other
    session."""
    plain, engine = make_engine(model), make_engine(model)
    failing = Failing(engine, when, poison=True)
    sessions = open_sessions(engine, 6)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.advance()
    for session in sessions:
        engine.close(session)
    failing.fails = lambda batch: False
    assert engine.table.vacant == 4
    assert not engine.table.active.any()
    assert engine.advance() == []
    first, expected = open_sessions(plain, 7), finish(plain)
    again, found = open_sessions(engine, 7), finish(engine)
    assert [found[session] for session in again] == [expected[session] for session in first]


def test_closing_the_failing_session_leaves_others_unaffected(model: Any) -> None:
    """Contract: once closed, a session that makes every pass fail does not change the others' turns."""
    plain, engine = make_engine(model, slots=8), make_engine(model, slots=8)
    first, expected = open_sessions(plain, 4), finish(plain)
    bad = 60
    Failing(engine, lambda batch: bool((batch.ids == bad).any()), poison=True)
    sessions = open_sessions(engine, 4)
    broken = engine.open([bad, 5, 6])
    engine.request(broken, 1, Sampling(max_tokens=3))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.advance()
    engine.close(broken)
    found = finish(engine)
    assert [found[session] for session in sessions] == [expected[session] for session in first]


def test_closing_a_session_stops_work_on_its_turn(model: Any) -> None:
    """Contract: closing a session in the middle of its turn, or while it waits for a slot, ends its work."""
    engine = make_engine(model, batch_share=0.01)
    sessions = [engine.open(random_tokens(seed, 8)) for seed in range(6)]
    for seed, session in enumerate(sessions):
        engine.request(session, seed, Sampling(max_tokens=2 if seed == 0 else 60))
    assert [turn.session for turn in engine.advance()] == sessions[:1]
    before = engine.counters
    for session in sessions[1:]:
        engine.close(session)
    assert engine.advance() == []
    assert engine.counters == before
    assert engine.table.vacant == 3, "the first session keeps its slot for the next turn"


def test_failed_read_and_fork_can_be_retried(model: Any) -> None:
    """Contract: a failed `read` or `fork` leaves its sessions idle; calling it again gives the same result."""
    plain, engine = make_engine(model), make_engine(model)
    (expected,) = plain.read([plain.open(random_tokens(1, 20))])
    session = engine.open(random_tokens(1, 20))
    failing = Failing(engine, once(is_prefill), poison=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.read([session])
    assert (engine.read([session])[0] == expected).all()
    other = engine.open(random_tokens(1, 20))
    failing.fails = once(is_prefill)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.fork(other, 2)
    for state in engine.read(engine.fork(other, 2)):
        assert state == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("lean", [True, False])
def test_full_session_does_not_write_into_the_next_row(model: Any, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a session of exactly max_length tokens, the cache's capacity, can be read while others decode, without changing
    their turns, its own cache or its neighbour's."""
    if not lean:
        monkeypatch.setattr("stages.engine.cuda_graphs.serves", lambda model: False)
    plain, engine = make_engine(model), make_engine(model)
    assert engine.cache.capacity == MAX_LENGTH
    first, expected = open_sessions(plain, 1), finish(plain)
    full, neighbour = engine.open(random_tokens(7, MAX_LENGTH)), engine.open(random_tokens(8, 20))
    (before, _) = engine.read([full, neighbour])
    held = [engine.snapshot(session) for session in (full, neighbour)]
    (session,) = open_sessions(engine, 1)
    assert finish(engine)[session] == expected[first[0]]
    for one, prefix in zip((full, neighbour), held, strict=True):
        assert torch.equal(engine.snapshot(one).cache, prefix.cache)
    (after,) = engine.read([engine.open((), held[0])])
    assert (after == before).all()
