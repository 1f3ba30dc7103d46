"""Samples new turns after prefixes of recorded episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stages.engine.engine import Engine, Sampling, Turn


@dataclass(frozen=True)
class ContinuationRequest:
    """Turns to sample within one episode: one after its first `lengths[i]` tokens with random key `keys[i]`, for each i."""

    token_ids: list[int]
    lengths: list[int]
    keys: list[int]


def sample_turns(engine: Engine, requests: Sequence[ContinuationRequest], sampling: Sampling, width: int) -> list[list[Turn]]:
    """The requested turns, in order. Each episode's tokens are fed once; about `width` turns run at once. A turn depends only on
    its prefix and its key."""
    return [turns for batch in _batches(requests, width) for turns in _sample(engine, batch, sampling)]


def _batches(requests: Sequence[ContinuationRequest], width: int) -> Iterator[list[ContinuationRequest]]:
    """Consecutive requests with at most `width` turns in total (at least one request)."""
    batch: list[ContinuationRequest] = []
    turns = 0
    for request in requests:
        if batch and turns + len(request.keys) > width:
            yield batch
            batch, turns = [], 0
        batch.append(request)
        turns += len(request.keys)
    if batch:
        yield batch


def _sample(engine: Engine, requests: Sequence[ContinuationRequest], sampling: Sampling) -> list[list[Turn]]:
    bases = [engine.open(request.token_ids[: max(request.lengths, default=1)]) for request in requests]
    places: dict[int, tuple[int, int]] = {}
    for number, (base, request) in enumerate(zip(bases, requests, strict=True)):
        engine.fork(base, 0)  # feeds the pending tokens of all bases together
        for place, (length, key) in enumerate(zip(request.lengths, request.keys, strict=True)):
            session = engine.open((), engine.snapshot(base, length))
            engine.request(session, key, sampling)
            places[session] = number, place
        engine.close(base)
    drawn: dict[tuple[int, int], Turn] = {}
    while len(drawn) < len(places):
        for turn in engine.advance():
            drawn[places[turn.session]] = turn
            engine.close(turn.session)
    return [[drawn[number, place] for place in range(len(request.keys))] for number, request in enumerate(requests)]
