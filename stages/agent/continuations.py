"""Turns that a policy draws anew after histories of recorded episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stages.engine.engine import Engine, Sampling, Turn


@dataclass(frozen=True)
class ContinuationRequest:
    """Of one episode's tokens: after the first `lengths[i]` of them a turn is to be drawn with random key `keys[i]`."""

    token_ids: list[int]
    lengths: list[int]
    keys: list[int]


def sample_turns(engine: Engine, asked: Sequence[ContinuationRequest], sampling: Sampling, width: int) -> list[list[Turn]]:
    """The turns that were asked for, in that order. An episode's tokens are read once for all of its histories; about `width`
    turns are under way at once. A turn depends on its history and its key alone."""
    found: list[list[Turn]] = []
    for run in _within(asked, width):
        found += _draw(engine, run, sampling)
    return found


def _within(asked: Sequence[ContinuationRequest], width: int) -> Iterator[list[ContinuationRequest]]:
    """Runs of episodes with at most `width` turns in all (one episode at least)."""
    run: list[ContinuationRequest] = []
    turns = 0
    for one in asked:
        if run and turns + len(one.keys) > width:
            yield run
            run, turns = [], 0
        run.append(one)
        turns += len(one.keys)
    if run:
        yield run


def _draw(engine: Engine, asked: Sequence[ContinuationRequest], sampling: Sampling) -> list[list[Turn]]:
    bases = [engine.open(one.token_ids[: max(one.lengths, default=1)]) for one in asked]
    places: dict[int, tuple[int, int]] = {}
    for number, (base, one) in enumerate(zip(bases, asked, strict=True)):
        engine.fork(base, 0)  # feeds what is not in the cache yet, of all of them
        for place, (length, key) in enumerate(zip(one.lengths, one.keys, strict=True)):
            session = engine.open((), engine.snapshot(base, length))
            engine.request(session, key, sampling)
            places[session] = number, place
        engine.close(base)
    drawn: dict[tuple[int, int], Turn] = {}
    while len(drawn) < len(places):
        for turn in engine.advance():
            drawn[places[turn.session]] = turn
            engine.close(turn.session)
    return [[drawn[number, place] for place in range(len(one.keys))] for number, one in enumerate(asked)]
