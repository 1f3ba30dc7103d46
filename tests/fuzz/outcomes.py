"""What came of a case, and of all of them."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REFUSED, ACCEPTED, LOST = "refused", "accepted", "lost"
PATIENCE_S = 120
"""A case that is not done by then hangs."""
LONGEST_MESSAGE = 4000
"""Characters of a refusal that a person can still read."""


class LostError(Exception):
    """A case that was neither refused clearly nor worked."""


class HangError(LostError):
    """A case that did not end."""


@dataclass(frozen=True)
class Outcome:
    """`kind`: REFUSED, ACCEPTED or LOST; `detail`: the refusal's words, or what went wrong."""

    kind: str
    detail: str = ""


@dataclass
class Tally:
    """Counts of one suite. `lost`: (number of the case, its operators, what went wrong)."""

    suite: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return sum(self.counts.values())

    def add(self, number: int, operators: str, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        if outcome.kind == LOST:
            self.lost.append((number, operators, outcome.detail))

    def row(self) -> dict[str, Any]:
        """Plain JSON; the same whenever it is counted."""
        return {"tried": self.tried, **{kind: self.counts[kind] for kind in (REFUSED, ACCEPTED, LOST)}, "seed": self.seed}

    def line(self) -> str:
        row = self.row()
        return (
            f"{self.suite}: {row['tried']} tried, {row['refused']} refused clearly, {row['accepted']} accepted and working, "
            f"{row['lost']} lost (seed {self.seed})"
        )


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise HangError in here after so many seconds (main thread only)."""

    def ring(number: int, frame: object) -> None:
        raise HangError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(case: Callable[[], Outcome], patience_s: int = PATIENCE_S) -> Outcome:
    """The outcome of `case`; whatever it raises is lost, with the innermost line of this project."""
    try:
        with at_most(patience_s):
            return case()
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        own = [frame for frame in frames if "/tests/fuzz/" not in frame.filename] or frames
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        said = " ".join(str(error).split())[:200]
        return Outcome(LOST, f"{type(error).__name__} at {where}: {said!a}")


def clear(message: str, *named: str) -> Outcome:
    """A refusal that names one of each of `named` (alternatives parted by |), and is short enough to be read."""
    if not message.strip():
        return Outcome(LOST, "refused without a word")
    if len(message) > LONGEST_MESSAGE:
        return Outcome(LOST, f"a refusal of {len(message)} characters: {message[:120]!r}")
    for wanted in named:
        if not any(word in message for word in wanted.split("|")):
            return Outcome(LOST, f"the refusal does not name {wanted}: {message[:200]!r}")
    return Outcome(REFUSED, message)
