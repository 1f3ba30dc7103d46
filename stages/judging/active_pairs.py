"""Which pairs of outcomes to ask about: a random start in which every outcome is in two pairs, then pairs of similar utility
whose outcomes were in few pairs (Mazeika et al., arXiv 2502.08640). Pure functions of their arguments."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence

from stages.judging.thurstone import Pair
from stages.seeding import permutation, stream

GROW, MOST_GROWTHS, MOST_HELD = 1.5, 5, 1000


def all_pairs(count: int) -> list[Pair]:
    """(i, j) with i < j, in order."""
    return list(itertools.combinations(range(count), 2))


def budget(count: int, multiplier: float = 2.0) -> int:
    """int(multiplier n log2 n) pairs; it may exceed their number."""
    return int(multiplier * count * math.log2(count))


def held_out(count: int, share: float, seed: int) -> list[Pair]:
    """Pairs that only measure, sorted."""
    pairs = all_pairs(count)
    return sorted(permutation(pairs, "utilities.held_out", seed)[: min(max(1, round(share * len(pairs))), MOST_HELD)])


def first_pairs(count: int, held: Collection[Pair], seed: int) -> list[Pair]:
    """The edges of a random cycle through all outcomes, so that each is in two; held-out ones are replaced at random."""
    order = permutation(range(count), "utilities.cycle", seed)
    edges = sorted({(min(pair), max(pair)) for pair in zip(order, [*order[1:], order[0]], strict=True)})
    kept, banned = [pair for pair in edges if pair not in held], {*held, *edges}
    others = permutation([pair for pair in all_pairs(count) if pair not in banned], "utilities.refill", seed)
    return sorted([*kept, *others[: len(edges) - len(kept)]])


def next_pairs(
    mu: Sequence[float],
    asked: Collection[Pair],
    held: Collection[Pair],
    wanted: int,
    low_gap: float,
    low_degree: float,
    seed: int,
) -> list[Pair]:
    """`wanted` further pairs, or all that are left. low_gap, low_degree: percentiles of a pair's gap in utility and of the number
    of pairs asked that its outcomes are in."""
    known = {*asked, *held}
    left = [pair for pair in all_pairs(len(mu)) if pair not in known]
    wanted = min(wanted, len(left))
    degree = Counter(outcome for pair in asked for outcome in pair)
    gaps = [abs(mu[one] - mu[other]) for one, other in left]
    degrees = [float(degree[one] + degree[other]) for one, other in left]
    chosen: list[Pair] = []
    for growth in range(MOST_GROWTHS + 1):
        factor = GROW**growth
        most_gap, most_degree = _percentile(gaps, low_gap * factor), _percentile(degrees, low_degree * factor)
        chosen = [pair for pair, gap, count in zip(left, gaps, degrees, strict=True) if gap <= most_gap and count <= most_degree]
        if len(chosen) >= wanted:
            break
    rng = stream("utilities.active", seed, len(asked))
    if len(chosen) < wanted:
        others = [pair for pair in left if pair not in set(chosen)]
        return sorted([*chosen, *rng.sample(others, wanted - len(chosen))])
    return sorted(rng.sample(chosen, wanted))


def random_pairs(asked: Collection[Pair], held: Collection[Pair], count: int, wanted: int, seed: int) -> list[Pair]:
    """`wanted` further pairs at random, or all that are left."""
    known = {*asked, *held}
    left = [pair for pair in all_pairs(count) if pair not in known]
    return sorted(permutation(left, "utilities.random", seed, len(asked))[:wanted])


def _percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation; percent above 100 is 100."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = min(percent, 100.0) / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
