"""A call that raises, or a session given up, leaves the engine as it was: the others go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import make_tiny_model

from stages.engine.decoder import Pass
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine

MAX_LENGTH = 96
When = Callable[[Pass], bool]
Turns = dict[int, tuple[tuple[int, ...], tuple[float, ...]]]


class Failing:
    """The engine's forward pass; `fails(batch)` says which passes raise. With `poison`, after leaving NaN in the cache."""

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


def feeds(batch: Pass) -> bool:
    return batch.ends is not None


def decodes(batch: Pass) -> bool:
    return batch.ends is None


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_model(61)


def words(seed: int, count: int) -> list[int]:
    return torch.randint(4, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(engine: TorchEngine, count: int) -> list[int]:
    sessions = [engine.open(words(seed, 5 + 9 * seed)) for seed in range(count)]
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


def new(model: Any, slots: int = 4, **settings: Any) -> TorchEngine:
    return TorchEngine(model, [], slots=slots, max_length=MAX_LENGTH, **settings)


@pytest.mark.parametrize("when", [feeds, decodes])
def test_a_failed_call_can_be_repeated(model: Any, when: When) -> None:
    """Contract: what was asked for before a call failed is still asked for, and comes out as it would have, no turn lost."""
    plain, engine = new(model), new(model)
    ask(plain, 7)
    ask(engine, 7)
    expected = finish(plain)
    Failing(engine, once(when))
    assert finish(engine, retries=1) == expected
    assert engine.counters["fed_tokens"] == plain.counters["fed_tokens"]


def test_a_failure_in_the_last_step_of_a_call_does_not_stop_what_was_fed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: where all is fed and drawing fails, the sessions' last tokens are fed again."""
    plain, engine = new(model), new(model)
    ask(plain, 3)
    ask(engine, 3)
    expected, draw = finish(plain), engine._draw

    def failing(*arguments: Any) -> Any:
        monkeypatch.setattr(engine, "_draw", draw)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "_draw", failing)
    found = finish(engine, retries=1)
    for session, (tokens, logprobs) in expected.items():
        assert found[session] == (tokens, pytest.approx(logprobs, abs=1e-6))


def test_turns_that_were_finished_when_a_call_failed_are_not_lost(model: Any) -> None:
    """Contract: a turn that ends in the call in which another one fails is returned by the next call."""
    engine = new(model, batch_share=1.0)
    short, long = (engine.open(words(seed, 6)) for seed in (1, 2))
    engine.request(short, 1, Sampling(max_tokens=1))
    engine.request(long, 2, Sampling(max_tokens=5))
    Failing(engine, once(decodes))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.advance()
    assert {turn.session for turn in engine.advance()} == {short, long}


@pytest.mark.parametrize("when", [feeds, decodes])
def test_sessions_that_are_given_up_after_a_failure_free_their_slots(model: Any, when: When) -> None:
    """Contract: after a call has failed, closing its sessions frees every slot, and what it left in the cache reaches nobody."""
    plain, engine = new(model), new(model)
    failing = Failing(engine, when, poison=True)
    sessions = ask(engine, 6)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.advance()
    for session in sessions:
        engine.close(session)
    failing.fails = lambda batch: False
    assert engine.table.vacant == 4
    assert not engine.table.active.any()
    assert engine.advance() == []
    first, expected = ask(plain, 7), finish(plain)
    again, found = ask(engine, 7), finish(engine)
    assert [found[session] for session in again] == [expected[session] for session in first]


def test_others_go_on_when_the_session_that_fails_is_closed(model: Any) -> None:
    """Contract: one session that makes every pass fail costs the others nothing once it is closed."""
    plain, engine = new(model, slots=8), new(model, slots=8)
    first, expected = ask(plain, 4), finish(plain)
    bad = 60
    Failing(engine, lambda batch: bool((batch.ids == bad).any()), poison=True)
    sessions = ask(engine, 4)
    broken = engine.open([bad, 5, 6])
    engine.request(broken, 1, Sampling(max_tokens=3))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.advance()
    engine.close(broken)
    found = finish(engine)
    assert [found[session] for session in sessions] == [expected[session] for session in first]


def test_a_turn_that_is_given_up_is_not_computed_on(model: Any) -> None:
    """Contract: closing a session in the middle of its turn, or while it waits for a slot, ends the work for it."""
    engine = new(model, batch_share=0.01)
    sessions = [engine.open(words(seed, 8)) for seed in range(6)]
    for seed, session in enumerate(sessions):
        engine.request(session, seed, Sampling(max_tokens=2 if seed == 0 else 60))
    assert [turn.session for turn in engine.advance()] == sessions[:1]
    before = engine.counters
    for session in sessions[1:]:
        engine.close(session)
    assert engine.advance() == []
    assert engine.counters == before
    assert engine.table.vacant == 3, "the first session keeps its slot for the next turn"


def test_reading_and_forking_can_be_repeated(model: Any) -> None:
    """Contract: `read` and `fork` that failed leave the sessions idle, and give the same when they are called again."""
    plain, engine = new(model), new(model)
    (expected,) = plain.read([plain.open(words(1, 20))])
    session = engine.open(words(1, 20))
    failing = Failing(engine, once(feeds), poison=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.read([session])
    assert (engine.read([session])[0] == expected).all()
    other = engine.open(words(1, 20))
    failing.fails = once(feeds)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.fork(other, 2)
    for state in engine.read(engine.fork(other, 2)):
        assert state == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("lean", [True, False])
def test_a_full_session_does_not_write_into_its_neighbours_row(model: Any, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a session of exactly max_length tokens, the cache's capacity, can be read while others decode; their turns, and
    what it and its neighbour hold in the cache, stay as they are."""
    if not lean:
        monkeypatch.setattr("stages.engine.decoder.serves", lambda model: False)
    plain, engine = new(model), new(model)
    assert engine.cache.capacity == MAX_LENGTH
    first, expected = ask(plain, 1), finish(plain)
    full, neighbour = engine.open(words(7, MAX_LENGTH)), engine.open(words(8, 20))
    (before, _) = engine.read([full, neighbour])
    held = [engine.snapshot(session) for session in (full, neighbour)]
    (session,) = ask(engine, 1)
    assert finish(engine)[session] == expected[first[0]]
    for one, prefix in zip((full, neighbour), held, strict=True):
        assert torch.equal(engine.snapshot(one).cache, prefix.cache)
    (after,) = engine.read([engine.open((), held[0])])
    assert (after == before).all()
