"""Scores of an answer: exact match, or the share of correct digits."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[+-]?\d+")


def normalize(text: str) -> str:
    """A number without thousands separators, plus sign, leading zeros and final full stop; other text in lower case."""
    plain = text.strip().lower().rstrip(".").replace(",", "")
    return str(int(plain)) if _NUMBER.fullmatch(plain) and len(plain) < 100 else plain


def exact_match(answer: str, gold: str) -> float:
    """1 if both are the same number, else 0."""
    return float(normalize(answer) == normalize(gold))


def digit_share(answer: str, gold: str) -> float:
    """The share of the longer number's characters, sign included, that are equal when both are aligned at the units; 0 for an
    answer that is not a number. In [0, 1]; 1 only for the correct number."""
    given, wanted = normalize(answer), normalize(gold)
    if not _NUMBER.fullmatch(given):
        return 0.0
    same = sum(a == b for a, b in zip(reversed(given), reversed(wanted), strict=False))
    return same / max(len(given), len(wanted))
