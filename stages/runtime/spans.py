"""Where a process spends its time: named spans of its main thread, and counts of the work done.

Times are exclusive: while a span inside another one runs, only the inner one is charged. What no span covers is `other`; before
the first span it is `start` (imports, reading inputs, loading a policy). Spans of other threads, which overlap with the main
thread's, are summed separately. A fork counts from zero; stages.runtime.stage adds up the processes of a stage.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from typing import Any, Self

START, OTHER = "start", "other"
PAUSED = "paused"
"""A pause that someone asked for: no part of the stage's time (stages.runtime.costs)."""
COLLECTING = "collecting"
"""A span that is not counted: the process only waits for others, which do all the work and whose totals are added."""


@dataclass
class Totals:
    """Of one process or more."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Name of a span -> seconds of the main threads. They add up to the running time of the processes."""
    beside: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Name of a span -> seconds of other threads."""
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, more: Totals) -> None:
        for own, other in ((self.seconds, more.seconds), (self.beside, more.beside)):
            for name, value in other.items():
                own[name] += value
        self.counts.update(more.counts)


class _Clock:
    def __init__(self) -> None:
        self.open: list[str] = []
        self.tick: Callable[[], float] | None = None
        self.restart(0.0)

    def restart(self, uptime: float) -> None:
        """Forget all totals; the process has run for `uptime` seconds."""
        self.thread, self.lock = threading.get_ident(), threading.Lock()
        self.totals = Totals()
        if uptime:
            self.totals.seconds[START] = uptime
        self.begun = bool(self.open)
        self.since = time.perf_counter()
        self.tick_at = 0.0

    def restart_in_fork(self) -> None:
        self.tick = None
        self.restart(0.0)

    def charge(self) -> None:
        """Charge the time since the last call to the innermost open span."""
        now = time.perf_counter()
        self.totals.seconds[self.open[-1] if self.open else OTHER] += now - self.since
        self.since = now

    def enter(self, name: str) -> None:
        self.charge()
        if not self.begun:
            self.begun = True
            self.totals.seconds[START] += self.totals.seconds.pop(OTHER)
        self.open.append(name)

    def leave(self) -> None:
        self.charge()
        self.open.pop()
        if self.tick and self.since >= self.tick_at:
            self.tick_at = self.since + self.tick()


_clock = _Clock()
os.register_at_fork(after_in_child=_clock.restart_in_fork)


class span(ContextDecorator):  # noqa: N801
    """Charge a block or a function to `name`. "training.forward" is a part of "training"."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _recreate_cm(self) -> Self:
        return type(self)(self.name)

    def __enter__(self) -> None:
        self.main = threading.get_ident() == _clock.thread
        if self.main:
            _clock.enter(self.name)
        else:
            self.since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.main:
            _clock.leave()
            return
        with _clock.lock:
            _clock.totals.beside[self.name] += time.perf_counter() - self.since


def count(name: str, number: int = 1) -> None:
    """Add `number` to the count `name`, from any thread."""
    with _clock.lock:
        _clock.totals.counts[name] += number


def restart(uptime: float = 0.0, tick: Callable[[], float] | None = None) -> None:
    """Forget all totals. uptime: seconds that the process has run, all charged to `start`; tick: called when a span of the main
    thread ends, but only as many seconds after its last call as that returned."""
    _clock.tick = tick
    _clock.restart(uptime)


def totals() -> Totals:
    """This process's totals so far."""
    _clock.charge()
    found = Totals()
    found.add(_clock.totals)
    found.seconds.pop(COLLECTING, None)
    return found


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Totals]:
    """What the function returns, and the totals of the call; for processes of a pool."""
    restart()
    return function(*arguments), totals()


def collected(results: Iterable[tuple[Any, Totals]]) -> Iterator[Any]:
    """The values of `timed` calls in other processes, whose totals are added to this process's as they arrive."""
    arriving = iter(results)
    while True:
        with span(COLLECTING):
            found = next(arriving, None)
        if found is None:
            return
        add(found[1])
        yield found[0]


def add(more: Totals) -> None:
    """Add the totals of another process to this one's, without its pauses: processes that share a stage's work pause together."""
    more.seconds.pop(PAUSED, None)
    _clock.totals.add(more)
