"""The thread that owns the engine: many orders at once, and an order that fails takes no other with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stages.agent.engine import EngineError, Sampling, Turn
from stages.agent.selecting import SelectingEngine, by_logprob
from stages.serving.choices import PLAIN, Choice
from stages.serving.turns import Order, TurnServer

LOST = 13
"""A key whose turn the engine loses, with all that is under way."""


class Echo:
    """An engine whose turns are the session's key and length; it refuses what is longer than 4 tokens."""

    def __init__(self) -> None:
        self.open_sessions: dict[int, list[int]] = {}
        self.asked: list[tuple[int, int]] = []
        self.made = 0
        self.counters: dict[str, int] = {}

    def open(self, token_ids: Sequence[int], prefix: object = None) -> int:
        if len(token_ids) > 4:
            raise EngineError("too long")
        self.made += 1
        self.open_sessions[self.made] = list(token_ids)
        return self.made

    def fork(self, session: int, count: int) -> list[int]:
        return [self.open(self.open_sessions[session]) for _ in range(count)]

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        self.asked.append((session, key))

    def advance(self) -> list[Turn]:
        asked, self.asked = self.asked, []
        if any(key == LOST for _, key in asked):
            raise ConnectionError("gone")
        return [
            Turn(session, (key % 100, len(self.open_sessions[session])), (-float(key % 7),), "stop") for session, key in asked
        ]

    def close(self, session: int) -> None:
        del self.open_sessions[session]


def order(length: int, *keys: int, choice: Choice = PLAIN) -> Order:
    return Order([1] * length, keys, Sampling(), choice)


def test_orders_are_answered_in_the_order_of_their_keys_and_leave_nothing() -> None:
    engine = Echo()
    server = TurnServer(SelectingEngine(engine, 1, by_logprob, str))  # type: ignore[arg-type]
    orders = [order(1 + place % 4, *range(place, place + 3)) for place in range(20, 40)]
    for one in orders:
        server.submit(one)
    for one in orders:
        assert [turn.token_ids for turn in one.turns.result(30)] == [(key % 100, len(one.token_ids)) for key in one.keys]
    best = server.submit(order(2, 1, choice=Choice(5, lambda: by_logprob))).result(30)
    assert len(best) == 1
    assert best[0].logprobs[0] >= -1.0, "the likeliest of five draws, of which the first has -1"
    server.close()
    assert engine.open_sessions == {}
    assert not server.alive


def test_an_order_that_fails_takes_no_later_one_with_it() -> None:
    """Contract: what an engine refuses is the order's error; what it loses fails what was under way; the next is answered."""
    engine = Echo()
    server = TurnServer(SelectingEngine(engine, 1, by_logprob, str))  # type: ignore[arg-type]

    def unreadable() -> None:
        raise FileNotFoundError("no Q-model")

    with pytest.raises(EngineError, match="too long"):
        server.submit(order(5, 1)).result(30)
    with pytest.raises(FileNotFoundError, match="no Q-model"):
        server.submit(order(1, 1, choice=Choice(2, unreadable))).result(30)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError, match="gone"):
        server.submit(order(2, LOST, 5)).result(30)
    assert server.submit(order(3, 7)).result(30)[0].token_ids == (7, 3)
    server.close()
    assert engine.open_sessions == {}
