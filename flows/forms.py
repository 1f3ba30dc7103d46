"""Fields that the settings of several flows have, and the mistakes in such settings in one line."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError


def _distinct(seeds: list[int]) -> list[int]:
    """Raises ValueError for a seed given twice: its runs are equal, and would count as independent ones."""
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise ValueError(f"{', '.join(map(str, twice))} given twice; runs of one seed are equal")
    return seeds


Seed = Annotated[int, Field(ge=0)]
Seeds = Annotated[list[Seed], Field(min_length=2), AfterValidator(_distinct)]


def mistakes(error: Exception) -> str:
    """What is wrong, in one line: of settings all mistakes, of another error its message."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = ((".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")) for one in error.errors())
    return "; ".join(f"{place}: {message}" if place else message for place, message in found)
