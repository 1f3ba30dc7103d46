"""Identifies functions by their results, so that no function is both in training and in test, however it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from stages.environments.code.problems import compiled, evaluated
from stages.seeding import stream

NUMBERS = range(1, 25)
"""Inputs for problems about numbers, whose constants have one digit."""


@cache
def _grid(kind: str, parameters: int) -> tuple[tuple[Any, ...], ...]:
    """Fixed arguments of the calls that distinguish functions of a kind."""
    rng = stream("code.behaviour", kind)
    if kind == "word":
        return tuple(("".join(rng.choice("abcdefgh") for _ in range(4 + draw % 3)),) for draw in range(24))
    if kind == "list":
        return tuple(([rng.randint(1, 12) for _ in range(2 + draw % 3)],) for draw in range(96))
    if parameters == 2:
        return tuple((a, b) for a in NUMBERS[:12] for b in NUMBERS[:12])
    return tuple((a,) for a in NUMBERS)


def behaviour(kind: str, parameters: Sequence[str], expression: str) -> str:
    """16 hex digits, equal for expressions with equal results on a fixed grid of inputs. `kind`: list, number, choice or word;
    number and choice share a grid, since they may be the same function. Runs the expression here: only for trusted ones."""
    code = compiled(expression)
    assert code is not None
    values = [
        repr(evaluated(code, parameters, arguments)) for arguments in _grid(kind.replace("choice", "number"), len(parameters))
    ]
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]
