"""Turns on demand: one thread that owns the engine and plays what other threads ask for, all of it at once."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from stages.agent.best_of_n import BestOfEngine
from stages.engine.engine import Sampling, Turn
from stages.serving.variants import Variant


@dataclass
class GenerationJob:
    """A turn after `token_ids` for each of `keys`."""

    token_ids: Sequence[int]
    keys: Sequence[int]
    sampling: Sampling
    choice: Variant
    turns: Future[list[Turn]] = field(default_factory=Future)
    """In the order of `keys`."""
    sessions: list[int] = field(default_factory=list)
    done: dict[int, Turn] = field(default_factory=dict)
    cancelled: bool = False


class EngineThread:
    """Takes orders from any thread. What an order draws depends on its own tokens and keys, not on the others (torch engine)."""

    def __init__(self, engine: BestOfEngine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[GenerationJob | None] = queue.SimpleQueue()
        self._orders: dict[int, GenerationJob] = {}
        """Session -> the order that it belongs to."""
        self._changed = threading.Event()
        """An order was cancelled since the thread last looked."""
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, order: GenerationJob) -> Future[list[Turn]]:
        self._inbox.put(order)
        return order.turns

    def cancel(self, order: GenerationJob) -> None:
        """Nobody wants the order's turns: it is not begun, or given up as soon as the engine's present step is over."""
        order.cancelled = True
        if not order.turns.cancel() and not order.turns.done():
            self._changed.set()

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
                elif order.turns.set_running_or_notify_cancel():
                    self._begin(order)
            try:
                self._advance()
            except Exception as error:
                self._retry(error)

    def _arrived(self, wait: bool) -> list[GenerationJob | None]:
        """Orders that came since; at least one, if it is to wait."""
        found = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _begin(self, order: GenerationJob) -> None:
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
            self._give_up(order, error)

    def _advance(self) -> None:
        """Go on until a turn is finished or an order cancelled. Raises what the engine raises."""
        self._changed.clear()
        for order in self._under_way():
            if order.cancelled:
                self._give_up(order, CancelledError())
        for turn in self.engine.advance(self._changed.is_set):
            self._end(turn)

    def _under_way(self) -> list[GenerationJob]:
        """Each order once, the oldest first."""
        return list({id(order): order for order in self._orders.values()}.values())

    def _end(self, turn: Turn) -> None:
        order = self._orders.pop(turn.session)
        order.done[turn.session] = turn
        if len(order.done) == len(order.sessions):
            order.turns.set_result([order.done[session] for session in order.sessions])
        self.engine.close(turn.session)

    def _retry(self, error: Exception) -> None:
        """After `error`, which may come of any order under way: play each by itself, so that it fails alone."""
        orders = self._under_way()
        for order in orders:
            self._put_down(order)
        if len(orders) == 1:
            orders[0].turns.set_exception(error)
            return
        for order in orders:
            self._begin(order)
            while not order.turns.done():
                try:
                    self._advance()
                except Exception as own:
                    self._give_up(order, own)

    def _put_down(self, order: GenerationJob) -> None:
        """Close what the order has open; it can be begun anew."""
        for session in order.sessions:
            self._orders.pop(session, None)
            if session not in order.done:
                with contextlib.suppress(Exception):
                    self.engine.close(session)
        order.sessions, order.done = [], {}

    def _give_up(self, order: GenerationJob, error: BaseException) -> None:
        """Let an order fail."""
        self._put_down(order)
        order.turns.set_exception(error)
