"""What a solution does, whatever it is written like: the same function must not be in training and in test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from stages.environments.code.problems import called, compiled
from stages.seeding import stream

NUMBERS = range(1, 25)
"""What problems about numbers are tested on, constants of one digit being near it."""


@cache
def _grid(kind: str, parameters: int) -> tuple[tuple[Any, ...], ...]:
    """Arguments of the calls that tell two functions of a kind apart; always the same ones."""
    rng = stream("code.behaviour", kind)
    if kind == "word":
        return tuple(("".join(rng.choice("abcdefgh") for _ in range(4 + draw % 3)),) for draw in range(24))
    if kind == "list":
        return tuple(([rng.randint(1, 12) for _ in range(2 + draw % 3)],) for draw in range(96))
    if parameters == 2:
        return tuple((a, b) for a in NUMBERS[:12] for b in NUMBERS[:12])
    return tuple((a,) for a in NUMBERS)


def behaviour(kind: str, parameters: Sequence[str], expression: str) -> str:
    """16 hex digits, equal for expressions of ours that give the same on every input of a fixed grid. `kind`: list, number,
    choice or word; problems about a number and choices share inputs, since they may be the same function. Not for what others
    wrote, which runs in the sandbox alone."""
    code = compiled(expression)
    assert code is not None
    values = [repr(called(code, parameters, arguments)) for arguments in _grid(kind.replace("choice", "number"), len(parameters))]
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]
