"""Outcomes of cases and their counts."""

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
TIMEOUT_S = 120
"""A case that takes longer hangs."""
LONGEST_MESSAGE = 4000
"""Maximum length of a readable message in characters."""


class LostError(Exception):
    """A case that was neither refused clearly nor accepted and working."""


class HangError(LostError):
    """A case that did not end."""


@dataclass(frozen=True)
class Outcome:
    """`kind`: REFUSED, ACCEPTED or LOST; `detail`: the error message, or what went wrong."""

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
        """As plain, deterministic JSON."""
        return {"tried": self.tried, **{kind: self.counts[kind] for kind in (REFUSED, ACCEPTED, LOST)}, "seed": self.seed}

    def line(self) -> str:
        row = self.row()
        return (
            f"{self.suite}: {row['tried']} tried, {row['refused']} refused clearly, {row['accepted']} accepted and working, "
            f"{row['lost']} lost (seed {self.seed})"
        )


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise HangError in this block after `seconds` (main thread only)."""

    def on_alarm(number: int, frame: object) -> None:
        raise HangError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(case: Callable[[], Outcome], timeout_s: int = TIMEOUT_S) -> Outcome:
    """The outcome of `case`; whatever it raises is lost, with the innermost line of this project."""
    try:
        with time_limit(timeout_s):
            return case()
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        own = [frame for frame in frames if "/tests/fuzz/" not in frame.filename] or frames
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        text = " ".join(str(error).split())[:200]
        return Outcome(LOST, f"{type(error).__name__} at {where}: {text!a}")


def check_refusal(message: str, *named: str) -> Outcome:
    """A refusal with `message`; lost if the message is empty, too long, or names no alternative (separated by |) of one of
    `named`."""
    if not message.strip():
        return Outcome(LOST, "refused with an empty message")
    if len(message) > LONGEST_MESSAGE:
        return Outcome(LOST, f"a message of {len(message)} characters: {message[:120]!r}")
    for wanted in named:
        if not any(word in message for word in wanted.split("|")):
            return Outcome(LOST, f"the message does not name {wanted}: {message[:200]!r}")
    return Outcome(REFUSED, message)
