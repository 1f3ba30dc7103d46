"""Numbers in text, as people write them: with commas, a dollar sign or a scale ("1.284 million")."""

from __future__ import annotations

import re
from decimal import Decimal

_SCALES = {"": 0, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
AMOUNT = r"(-?\$?\d[\d,]*(?:\.\d+)?(?: (?:thousand|million|billion|trillion))?)"
"""Pattern of a number, one group."""
_NUMBER = re.compile(rf"{AMOUNT}(?![\d.,]*\d)")
_ANYWHERE = re.compile(rf"(?<!\w)(?<!\d[.,]){_NUMBER.pattern}")


def _decimal(written: str) -> Decimal:
    digits, _, scale = written.partition(" ")
    return Decimal(digits.replace(",", "").replace("$", "")).scaleb(_SCALES[scale])


def amount(text: str) -> Decimal | None:
    """The number that a text begins with, which may have commas, a dollar sign, a scale ("1.284 million") and words after it;
    None if it begins with none."""
    found = _NUMBER.match(text.strip().lower())
    return _decimal(found.group(1)) if found else None


def amounts(text: str) -> set[Decimal]:
    """All numbers in a text that are words of their own."""
    return {_decimal(found.group(1)) for found in _ANYWHERE.finditer(" ".join(text.lower().split()))}


def sole_amount(text: str) -> Decimal | None:
    """The number that a text consists of, punctuation at its end aside; None if it has other words."""
    found = _NUMBER.fullmatch(text.strip().lower().rstrip(".,;:"))
    return _decimal(found.group(1)) if found else None
