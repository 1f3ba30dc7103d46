"""Turns on demand: one thread that owns the engine and plays what other threads ask for, all of it at once."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from stages.agent.engine import Sampling, Turn
from stages.agent.selecting import SelectingEngine
from stages.serving.choices import Choice


@dataclass
class Order:
    """A turn after `token_ids` for each of `keys`."""

    token_ids: Sequence[int]
    keys: Sequence[int]
    sampling: Sampling
    choice: Choice
    turns: Future[list[Turn]] = field(default_factory=Future)
    """In the order of `keys`."""
    sessions: list[int] = field(default_factory=list)
    done: dict[int, Turn] = field(default_factory=dict)


class TurnServer:
    """Takes orders from any thread. What an order draws depends on its own tokens and keys, not on the others (torch engine)."""

    def __init__(self, engine: SelectingEngine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._orders: dict[int, Order] = {}
        """Session -> the order that it belongs to."""
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, order: Order) -> Future[list[Turn]]:
        self._inbox.put(order)
        return order.turns

    def close(self) -> None:
        """Finish what was ordered, and end."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_ = True
        while open_ or self._orders:
            for order in self._arrived(wait=open_ and not self._orders):
                if order is None:
                    open_ = False
                else:
                    self._begin(order)
            try:
                turns = self.engine.advance()
            except Exception as error:
                self._give_up(list(self._orders.values()), error)
                continue
            for turn in turns:
                self._end(turn)

    def _arrived(self, wait: bool) -> list[Order | None]:
        """Orders that came since; at least one, if it is to wait."""
        found = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _begin(self, order: Order) -> None:
        if not order.turns.set_running_or_notify_cancel():
            return
        try:
            rank = order.choice.rank()
            order.sessions = [self.engine.open(order.token_ids)]
            if len(order.keys) > 1:
                order.sessions += self.engine.fork(order.sessions[0], len(order.keys) - 1)
            for session, key in zip(order.sessions, order.keys, strict=True):
                self._orders[session] = order
                self.engine.choose_by(session, order.choice.n, rank)
                self.engine.request(session, key, order.sampling)
        except Exception as error:
            self._give_up([order], error)

    def _end(self, turn: Turn) -> None:
        order = self._orders.pop(turn.session)
        order.done[turn.session] = turn
        self.engine.close(turn.session)
        if len(order.done) == len(order.sessions):
            order.turns.set_result([order.done[session] for session in order.sessions])

    def _give_up(self, orders: Sequence[Order], error: Exception) -> None:
        """Let orders fail; a session that was not finished is closed."""
        for order in orders:
            for session in order.sessions:
                self._orders.pop(session, None)
                if session not in order.done:
                    with contextlib.suppress(Exception):
                        self.engine.close(session)
            if not order.turns.done():
                order.turns.set_exception(error)
