"""Covering arrays: few rows in which every combination of the options of any t factors occurs (combinatorial testing)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from stages.seeding import stream

TRIES, CANDIDATES = 4, 10
"""Arrays that are made, and rows tried for each row of one."""
Row = tuple[int, ...]
Combination = tuple[tuple[int, ...], tuple[int, ...]]
"""Places of factors, and an option of each."""


def combinations_of(sizes: Sequence[int], strength: int) -> set[Combination]:
    """All that an array of this strength must cover; factors of `sizes` options each."""
    return {
        (places, options)
        for places in combinations(range(len(sizes)), min(strength, len(sizes)))
        for options in product(*(range(sizes[place]) for place in places))
    }


def uncovered(rows: Sequence[Row], sizes: Sequence[int], strength: int) -> set[Combination]:
    """What no row has; empty for a covering array."""
    left = combinations_of(sizes, strength)
    return {one for one in left if not any(_has(row, one) for row in rows)}


def _has(row: Row, combination: Combination) -> bool:
    places, options = combination
    return all(row[place] == option for place, option in zip(places, options, strict=True))


def covering_array(sizes: Sequence[int], strength: int, seed: int) -> list[Row]:
    """Rows of option numbers; the shortest of TRIES arrays. [] for strength 0 or no factors."""
    if strength < 1 or not sizes:
        return []
    return min((_array(sizes, strength, (seed, "covering", number)) for number in range(TRIES)), key=len)


def _array(sizes: Sequence[int], strength: int, key: tuple[object, ...]) -> list[Row]:
    """Greedily: each row is, of CANDIDATES that start from an open combination and take up the factors in a random order, the one
    that covers most of what is open (AETG, Cohen et al. 1997)."""
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
    others = [place for place in range(len(sizes)) if place not in row]
    rng.shuffle(others)
    for place in others:
        counts = [0] * sizes[place]
        for places, options in left:
            if place in places and all(row.get(other, option) == option for other, option in zip(places, options, strict=True)):
                counts[options[places.index(place)]] += 1
        row[place] = rng.choice([option for option, count in enumerate(counts) if count == max(counts)])
    return tuple(row[place] for place in range(len(sizes)))
