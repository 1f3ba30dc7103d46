"""The suites by name, and their counts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

from .outcomes import Outcome, Tally

COUNTS = {"params": 5000, "records": 2000, "imports": 2000, "requests": 2000, "kills": 36}
"""Suite -> default number of cases."""


def cases(name: str, count: int, seed: int = 0, source: Path | None = None) -> Iterator[tuple[str, Outcome]]:
    """(mutation, outcome) of each case; `source`: a finished run, for kills."""
    suite = importlib.import_module(f".{name}", __package__)
    if name == "kills":
        yield from suite.cases(seed, count, source)
    else:
        yield from (suite.case(seed, number) for number in range(count))


def counted(
    name: str,
    count: int,
    seed: int = 0,
    source: Path | None = None,
    report: Callable[[Tally, str, Outcome], None] = lambda *_: None,
) -> Tally:
    """The tally of `count` cases; `report` is called after each."""
    tally = Tally(name, seed)
    for number, (operators, outcome) in enumerate(cases(name, count, seed, source)):
        tally.add(number, operators, outcome)
        report(tally, operators, outcome)
    return tally
