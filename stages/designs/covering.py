"""Covering arrays: few rows in which every combination of the options of any t factors occurs (combinatorial testing)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from stages.seeding import stream

TRIES, CANDIDATES = 4, 10
"""Arrays generated, and candidates per row."""
Row = tuple[int, ...]
Combination = tuple[tuple[int, ...], tuple[int, ...]]
"""Indices of factors, and an option of each."""


def combinations_of(sizes: Sequence[int], strength: int) -> set[Combination]:
    """All combinations that an array of this strength must cover, given the number of options per factor."""
    return {
        (factors, options)
        for factors in combinations(range(len(sizes)), min(strength, len(sizes)))
        for options in product(*(range(sizes[factor]) for factor in factors))
    }


def _has(row: Row, combination: Combination) -> bool:
    factors, options = combination
    return all(row[factor] == option for factor, option in zip(factors, options, strict=True))


def covering_array(sizes: Sequence[int], strength: int, seed: int) -> list[Row]:
    """Rows of option numbers; the shortest of TRIES arrays. [] for strength 0 or no factors."""
    if strength < 1 or not sizes:
        return []
    return min((_array(sizes, strength, (seed, "covering", number)) for number in range(TRIES)), key=len)


def _array(sizes: Sequence[int], strength: int, key: tuple[object, ...]) -> list[Row]:
    """Greedy construction (AETG, Cohen et al. 1997): each row is the one of CANDIDATES that covers most uncovered combinations; a
    candidate starts from an uncovered combination and sets the other factors in random order."""
    left = combinations_of(sizes, strength)
    rows: list[Row] = []
    while left:
        ordered = sorted(left)
        candidates = [_candidate(sizes, ordered, (*key, len(rows), number)) for number in range(CANDIDATES)]
        row = max(candidates, key=lambda one: sum(_has(one, combination) for combination in ordered))
        rows.append(row)
        left = {one for one in left if not _has(row, one)}
    return rows


def _candidate(sizes: Sequence[int], left: Sequence[Combination], key: tuple[object, ...]) -> Row:
    rng = stream(*key)
    row = dict(zip(*rng.choice(left), strict=True))
    others = [factor for factor in range(len(sizes)) if factor not in row]
    rng.shuffle(others)
    for factor in others:
        counts = [0] * sizes[factor]
        for factors, options in left:
            if factor in factors and all(
                row.get(other, option) == option for other, option in zip(factors, options, strict=True)
            ):
                counts[options[factors.index(factor)]] += 1
        row[factor] = rng.choice([option for option, count in enumerate(counts) if count == max(counts)])
    return tuple(row[factor] for factor in range(len(sizes)))
