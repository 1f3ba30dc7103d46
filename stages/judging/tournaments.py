"""Tournaments inside a group: which pairs are judged, and the order of finish (Zhang et al., arXiv 2601.06487).

A scheme is a generator: it yields rounds of pairs that can be judged at the same time, receives (S_i, S_j) of each (None for a
match that was dropped) and returns each entrant's reward. Entrant 0 is the anchor. Matches of N entrants: anchor N - 1, unseeded
single elimination N - 1, seeded single elimination 2 (N - 1), double elimination 2 N - 2, Swiss floor(N / 2) per round, round
robin N (N - 1) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import Literal

from stages.judging.measures import TIE
from stages.judging.ranks import joined, min_rank_rewards, quantile_rewards, shared_quantiles

Pair = tuple[int, int]
Result = tuple[float, float] | None
Rewards = tuple[float, ...]
Rounds = Generator[list[Pair], list[Result], Rewards]
TiePolicy = Literal["higher_seed", "split_rank", "first_listed"]
Byes = Literal["top_seeds", "reference"]


@dataclass(frozen=True)
class Rules:
    """tie_policy: who advances from a tied match: the higher seed; or whoever is named first, as in the reference code; or, with
    split_rank, the higher seed, and both share the mean of their rewards; of Swiss see `swiss`. byes: to the top seeds, or as in
    the reference code, whose empty places are removed before players are paired. swiss_rounds: None for
    min(ceil(log2 N), N - 1)."""

    tie_policy: TiePolicy = "higher_seed"
    byes: Byes = "top_seeds"
    swiss_rounds: int | None = None


@dataclass
class _Scores:
    """The scores of each entrant, all matches."""

    of: dict[int, list[float]] = field(default_factory=dict)

    def add(self, pair: Pair, result: Result) -> None:
        for entrant, score in zip(pair, result or (), strict=False):
            self.of.setdefault(entrant, []).append(score)

    def mean(self, entrant: int) -> float:
        held = self.of.get(entrant, ())
        return sum(held) / len(held) if held else -math.inf


def _anchored(count: int, scores: _Scores) -> Generator[list[Pair], list[Result], list[float]]:
    """Everyone against entrant 0: the score of each, the anchor's being its mean, and a dropped match a tie with it."""
    pairs = [(0, other) for other in range(1, count)]
    results = yield pairs
    for pair, result in zip(pairs, results, strict=True):
        scores.add(pair, result)
    return [scores.mean(entrant if entrant in scores.of else 0) for entrant in range(count)]


def anchor(count: int, rng: Random, rules: Rules) -> Rounds:
    """Rewards by min-rank of the scores against entrant 0."""
    found = yield from _anchored(count, _Scores())
    return min_rank_rewards(found)


def round_robin(count: int, rng: Random, rules: Rules) -> Rounds:
    """Rewards by min-rank of the share of wins, a tie being half a win for both; a dropped match does not count, and who has no
    match left gets half."""
    pairs = list(combinations(range(count), 2))
    results = yield pairs
    points: list[list[float]] = [[] for _ in range(count)]
    for pair, result in zip(pairs, results, strict=True):
        for entrant, share in zip(pair, _points(result) if result is not None else (), strict=False):
            points[entrant].append(share)
    return min_rank_rewards([sum(of) / len(of) if of else 0.5 for of in points])


def _points(result: Result) -> tuple[float, float]:
    """1 and 0 for a win, half each for a tie, or for a dropped match where a scheme can't go on without a result."""
    if result is None or abs(result[0] - result[1]) <= TIE:
        return 0.5, 0.5
    return (1.0, 0.0) if result[0] > result[1] else (0.0, 1.0)


def bracket(size: int) -> list[int]:
    """Seeds in the order of a bracket of `size`, a power of two, neighbours meeting first: 8 -> 0, 7, 3, 4, 1, 6, 2, 5."""
    order = [0]
    while len(order) < size:
        count = 2 * len(order)
        order = [seed for one in order for seed in (one, count - 1 - one)]
    return order


def _pairings(alive: Sequence[int | None], byes: Byes) -> tuple[list[Pair], list[int]]:
    """Neighbours that play, and players that advance without: with top_seeds those beside an empty place (None), else the odd
    one at the end, who then moves to the front."""
    if byes == "reference":
        present = [player for player in alive if player is not None]
        odd = present[-1:] if len(present) % 2 else []
        return [(present[place], present[place + 1]) for place in range(0, len(present) - 1, 2)], odd
    pairs, free = [], []
    for one, other in zip(alive[::2], alive[1::2], strict=True):
        if one is not None and other is not None:
            pairs.append((one, other))
        elif (player := one if other is None else other) is not None:
            free.append(player)
    return pairs, free


def _next_round(alive: Sequence[int | None], won: dict[Pair, int], free: Sequence[int], byes: Byes) -> list[int | None]:
    """Who plays the next round, in the order of the bracket."""
    if byes == "reference":
        return [*free, *won.values()]
    following: list[int | None] = []
    for one, other in zip(alive[::2], alive[1::2], strict=True):
        if one is not None and other is not None:
            following.append(won[one, other])
        else:
            following.append(one if other is None else other)
    return following


def _decide(pair: Pair, result: Result, seed: Sequence[int], rules: Rules) -> tuple[int, bool]:
    """The winner, and whether the match was tied (or dropped). seed[entrant]: 0 is the highest."""
    shares = _points(result)
    if shares[0] != shares[1]:
        return pair[shares[1] > shares[0]], False
    if rules.tie_policy == "first_listed":
        return pair[0], True
    return min(pair, key=lambda entrant: seed[entrant]), True


def _elimination(seeds: Sequence[int], scores: _Scores, rules: Rules) -> Rounds:
    """A bracket of the entrants in `seeds`, best first. Order of finish: the champion, then the losers of each round from the
    last on, inside a round by their mean score, then by seed."""
    count = len(seeds)
    places = bracket(1 << (count - 1).bit_length())
    alive: list[int | None] = [seeds[place] if place < count else None for place in places]
    seed = [list(seeds).index(entrant) for entrant in range(count)]
    out: list[list[int]] = []
    ties: list[Pair] = []
    while sum(player is not None for player in alive) > 1:
        pairs, free = _pairings(alive, rules.byes)
        results = (yield pairs) if pairs else []
        won: dict[Pair, int] = {}
        for pair, result in zip(pairs, results, strict=True):
            scores.add(pair, result)
            won[pair], tied = _decide(pair, result, seed, rules)
            if tied:
                ties.append(pair)
        out.append([pair[pair[0] == won[pair]] for pair in pairs])
        alive = _next_round(alive, won, free, rules.byes)
    (champion,) = [player for player in alive if player is not None]
    order = [champion]
    for losers in reversed(out):
        order += sorted(losers, key=lambda entrant: (-scores.mean(entrant), seed[entrant]))
    return quantile_rewards(order, _sharing(out, scores, ties) if rules.tie_policy == "split_rank" else ())


def _sharing(rounds: Sequence[Sequence[int]], scores: _Scores, ties: Sequence[Pair]) -> list[set[int]]:
    """Who shares a rank: the two of a tied match, and losers of one round with equal mean scores."""
    equal = [
        pair
        for losers in rounds
        for pair in combinations(losers, 2)
        if scores.mean(pair[0]) == scores.mean(pair[1]) or abs(scores.mean(pair[0]) - scores.mean(pair[1])) <= TIE
    ]
    return joined([*ties, *equal])


def seeded_single_elimination(count: int, rng: Random, rules: Rules) -> Rounds:
    """Seeds by the scores against the anchor, then a bracket; all scores, seeding included, order the losers of a round."""
    scores = _Scores()
    found = yield from _anchored(count, scores)
    seeds = sorted(range(count), key=lambda entrant: (-found[entrant], entrant))
    return (yield from _elimination(seeds, scores, rules))


def unseeded_single_elimination(count: int, rng: Random, rules: Rules) -> Rounds:
    """A bracket in random order."""
    return (yield from _elimination(rng.sample(range(count), count), _Scores(), rules))


def double_elimination(count: int, rng: Random, rules: Rules) -> Rounds:
    """In random order: all rounds of the winners, then those of the losers, joined in the order in which they dropped, then one
    final. Order of finish: the finalists, then the losers' bracket from its last round on."""
    order, scores = rng.sample(range(count), count), _Scores()
    seed = [order.index(entrant) for entrant in range(count)]
    ties: list[Pair] = []

    def one_round(players: Sequence[int]) -> Generator[list[Pair], list[Result], tuple[list[int], list[int]]]:
        """Winners (the odd one at the end included) and losers."""
        pairs = [(players[place], players[place + 1]) for place in range(0, len(players) - 1, 2)]
        results = (yield pairs) if pairs else []
        winners, losers = [], []
        for pair, result in zip(pairs, results, strict=True):
            scores.add(pair, result)
            winner, tied = _decide(pair, result, seed, rules)
            if tied:
                ties.append(pair)
            winners.append(winner)
            losers.append(pair[pair[0] == winner])
        return [*winners, *players[2 * len(pairs) :]], losers

    winners, dropped = list(order), []
    while len(winners) > 1:
        winners, losers = yield from one_round(winners)
        dropped.append(losers)
    out: list[list[int]] = []
    pool: list[int] = []
    while dropped or len(pool) > 1:
        pool += dropped.pop(0) if dropped else []
        pool, losers = yield from one_round(pool)
        out.append(losers)
    (best, *_), final_losers = yield from one_round([winners[0], pool[0]])
    out.append(final_losers)
    finish = [best]
    for losers in reversed(out):
        finish += sorted(losers, key=lambda entrant: (-scores.mean(entrant), seed[entrant]))
    return quantile_rewards(finish, _sharing(out, scores, ties) if rules.tie_policy == "split_rank" else ())


def swiss_rounds(count: int, rules: Rules) -> int:
    return min(math.ceil(math.log2(count)), count - 1) if rules.swiss_rounds is None else rules.swiss_rounds


def swiss(count: int, rng: Random, rules: Rules) -> Rounds:
    """Players of equal points meet, after a shuffle, and not twice where that can be avoided; the odd one, who had the fewest
    such rounds and then the fewest points, gets a point. Order by points, then by Buchholz (the sum of the opponents' points);
    who has equal both shares the mean of their rewards.

    Under split_rank the odd one draws with an opponent of its own points instead: a point would put it before others of a group
    without differences."""
    order, shares_ranks = rng.sample(range(count), count), rules.tie_policy == "split_rank"
    points, idle = [0.0] * count, [0] * count
    met: list[list[int]] = [[] for _ in range(count)]
    for _ in range(swiss_rounds(count, rules)):
        standing = sorted(order, key=lambda entrant: (-points[entrant], order.index(entrant)))
        if count % 2:
            odd = min(reversed(standing), key=lambda entrant: (idle[entrant], points[entrant]))
            standing.remove(odd)
            idle[odd] += 1
            points[odd] += 0.5 if shares_ranks else 1.0
        pairs = _swiss_pairs(standing, met) or list(zip(standing[::2], standing[1::2], strict=True))
        results = yield pairs
        for (one, other), result in zip(pairs, results, strict=True):
            shares = _points(result)
            points[one] += shares[0]
            points[other] += shares[1]
            met[one].append(other)
            met[other].append(one)
    buchholz = [
        sum(points[other] for other in met[entrant]) + shares_ranks * idle[entrant] * points[entrant] for entrant in range(count)
    ]
    return shared_quantiles(list(zip(points, buchholz, strict=True)))


_TRIES = 2000
"""Pairings that are tried before players meet twice."""


def _swiss_pairs(standing: Sequence[int], met: Sequence[Sequence[int]]) -> list[Pair] | None:
    """Pairs of neighbours in the standing without a rematch; None if there are none, or too many were tried."""
    tries = 0

    def search(left: list[int]) -> list[Pair] | None:
        nonlocal tries
        if not left:
            return []
        first = left[0]
        for other in left[1:]:
            tries += 1
            if tries > _TRIES:
                return None
            if other in met[first]:
                continue
            rest = search([player for player in left[1:] if player != other])
            if rest is not None:
                return [(first, other), *rest]
        return None

    return search(list(standing))


Scheme = Callable[[int, Random, Rules], Rounds]
SCHEMES: dict[str, Scheme] = {
    "anchor": anchor,
    "round_robin": round_robin,
    "seeded_single_elimination": seeded_single_elimination,
    "unseeded_single_elimination": unseeded_single_elimination,
    "double_elimination": double_elimination,
    "swiss": swiss,
}


def match_count(scheme: str, count: int, rules: Rules | None = None) -> int:
    """Matches of a tournament of `count` entrants; twice as many judge calls with both orders."""
    counts = {
        "anchor": count - 1,
        "unseeded_single_elimination": count - 1,
        "seeded_single_elimination": 2 * (count - 1),
        "double_elimination": 2 * (count - 1),
        "swiss": count // 2 * swiss_rounds(count, rules or Rules()),
        "round_robin": count * (count - 1) // 2,
    }
    return counts[scheme]
