"""Runs the items of a graph side by side, each as soon as the items that it needs are done.

graphlib orders them, and concurrent.futures or Prefect run them; neither limits which items may run together, or lets the running
ones finish after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from graphlib import TopologicalSorter
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result", covariant=True)
TICK_S = 2.0


class Started(Protocol[Result]):
    """A future of concurrent.futures or of Prefect."""

    def add_done_callback(self, call: Callable[[Any], None], /) -> None: ...

    def result(self) -> Result: ...


def run_graph(
    needs: Mapping[str, Iterable[str]],
    start: Callable[[str], Started[Result]],
    jobs: int,
    alone: Set[str] = frozenset(),
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Result]:
    """The results of `start(item)` for all items of `needs` (item -> items that it needs), in that order.

    At most `jobs` items run at a time, and at most one of `alone`; `tick` is called every few seconds. After a failure nothing
    more starts; once the running items have ended, the failure is raised: of several, one that no retry can cure, else the first.
    """
    order, ended = TopologicalSorter(needs), SimpleQueue[str]()
    order.prepare()
    ready: list[str] = []
    running: dict[str, Started[Result]] = {}
    results: dict[str, Result] = {}
    errors: list[Exception] = []
    while order.is_active():
        ready += sorted(order.get_ready(), key=list(needs).index)
        for item in [] if errors else list(ready):
            if len(running) < jobs and not (item in alone and alone & running.keys()):
                ready.remove(item)
                running[item] = start(item)
                running[item].add_done_callback(lambda _, item=item: ended.put(item))
        if not running:
            break
        try:
            item = ended.get(timeout=TICK_S)
        except Empty:
            tick()
            continue
        try:
            results[item] = running.pop(item).result()
            order.done(item)
        except Exception as error:
            errors.append(error)
    tick()
    if errors:
        raise next((error for error in errors if getattr(error, "bad_parameters", False)), errors[0])
    return {item: results[item] for item in needs}
