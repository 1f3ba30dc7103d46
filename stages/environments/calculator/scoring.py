"""What an answer is worth: the right number, or the share of its digits that are right."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from stages.records.task import Task

_NUMBER = re.compile(r"[+-]?\d+")


def normalize(text: str) -> str:
    """A number without thousands' commas, a plus sign, leading zeros or a full stop; other text in lower case as it stands."""
    plain = text.strip().lower().rstrip(".").replace(",", "")
    return str(int(plain)) if _NUMBER.fullmatch(plain) and len(plain) < 100 else plain


def exact_match(answer: str, gold: str) -> float:
    """1 if both are the same number, else 0."""
    return float(normalize(answer) == normalize(gold))


def digit_share(answer: str, gold: str) -> float:
    """Places, counted from the units, where both numbers have the same digit (or the same sign before the first), as a share of
    the longer one; 0 for an answer that is no number. In [0, 1], and 1 for the right number alone."""
    given, wanted = normalize(answer), normalize(gold)
    if not _NUMBER.fullmatch(given):
        return 0.0
    same = sum(a == b for a, b in zip(reversed(given), reversed(wanted), strict=False))
    return same / max(len(given), len(wanted))


def constant_success(tasks: Sequence[Task]) -> float:
    """Success on `tasks` of the best single answer in hindsight. Raises ValueError for no tasks."""
    if not tasks:
        raise ValueError("constant_success needs at least one task")
    return max(Counter(task.spec["answer"] for task in tasks).values()) / len(tasks)
