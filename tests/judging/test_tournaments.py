"""Tournaments: the paper's worked numbers, match counts, champions under a perfect judge, and ties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from by_hand import assert_near

from stages.algorithms.parts.advantage import episode_advantages
from stages.judging.ranks import joined, min_rank_rewards, quantile_rewards, shared_quantiles
from stages.judging.tournaments import SCHEMES, Pair, Rewards, Rules, bracket, match_count

Q8 = [0.3, -1.2, 2.0, 0.9, -0.4, 1.1, -2.0, 0.0]


def played(
    scheme: str,
    qualities: Sequence[float],
    rules: Rules | None = None,
    seed: int = 0,
    drop: Callable[[Pair], bool] = lambda _: False,
) -> tuple[Rewards, list[Pair]]:
    """Rewards and matches under a perfect judge: S_i = 12 + (q_i - q_j)."""
    rounds = SCHEMES[scheme](len(qualities), Random(seed), rules or Rules())
    matches: list[Pair] = []
    pairs = next(rounds)
    while True:
        matches += pairs
        gaps = [qualities[one] - qualities[other] for one, other in pairs]
        results = [None if drop(pair) else (12 + gap, 12 - gap) for pair, gap in zip(pairs, gaps, strict=True)]
        try:
            pairs = rounds.send(results)
        except StopIteration as stop:
            return stop.value, matches


def advantages(rewards: Sequence[float]) -> torch.Tensor:
    return episode_advantages(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), "group", "group")


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2, [0.7071, -0.7071]), (4, [1.1619, 0.3873, -0.3873, -1.1619]), (8, [1.4289])],
)
def test_advantages_of_distinct_ranks(count: int, expected: list[float]) -> None:
    found = advantages(quantile_rewards(range(count)))
    assert_near(found[: len(expected)], expected, atol=1e-4)
    assert float(found.sum()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("scheme", ["seeded_single_elimination", "double_elimination", "round_robin"])
@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 8])
def test_perfect_judge_makes_the_best_the_champion(scheme: str, count: int) -> None:
    for seed in range(5):
        qualities = Random(seed).sample(Q8, count)
        rewards, _ = played(scheme, qualities, seed=seed)
        assert rewards[qualities.index(max(qualities))] == 1.0
        assert sorted(rewards) == pytest.approx([place / (count - 1) for place in range(count)])
        if scheme == "round_robin":
            order = sorted(range(count), key=lambda entrant: qualities[entrant])
            assert [rewards[entrant] for entrant in order] == sorted(rewards)


def test_anchor_orders_the_others_but_may_misplace_itself() -> None:
    """The paper's worked example: s = (14.63, 12.1, 8, 8)."""
    rewards, matches = played("anchor", [1, 1.1, -3, -3])
    assert matches == [(0, 1), (0, 2), (0, 3)]
    assert rewards == pytest.approx((1.0, 0.5, 0.0, 0.0)), "the anchor is first although entrant 1 is better"


@pytest.mark.parametrize(
    ("scheme", "at_8", "at_16"),
    [
        ("anchor", 7, 15),
        ("seeded_single_elimination", 14, 30),
        ("unseeded_single_elimination", 7, 15),
        ("double_elimination", 14, 30),
        ("swiss", 12, 32),
        ("round_robin", 28, 120),
    ],
)
def test_match_counts(scheme: str, at_8: int, at_16: int) -> None:
    for count, expected in ((8, at_8), (16, at_16)):
        _, matches = played(scheme, Random(1).sample(range(100), count))
        assert len(matches) == match_count(scheme, count) == expected
    for count in range(2, 12):
        assert len(played(scheme, list(range(count)))[1]) == match_count(scheme, count)


def test_min_ranks() -> None:
    assert min_rank_rewards([3, 1, 1, 1]) == (1, 0, 0, 0)
    assert min_rank_rewards([9, 9, 5, 5]) == (1, 1, 0, 0)
    assert_near(advantages(min_rank_rewards([9, 9, 5, 5])), [0.866, 0.866, -0.866, -0.866], atol=1e-3)


def test_swiss_ties_share() -> None:
    assert shared_quantiles([2, 1, 1, 0]) == (1, 0.5, 0.5, 0)
    assert shared_quantiles([(1, 2), (1, 3), (0, 0)]) == (0.5, 1.0, 0.0)


def test_swiss_avoids_rematches_and_leaves_nobody_out_twice() -> None:
    for seed in range(20):
        _, matches = played("swiss", Random(seed).sample(range(100), 7), seed=seed)
        assert len({frozenset(pair) for pair in matches}) == len(matches) == 9
        idle = [set(range(7)) - {player for pair in matches[turn : turn + 3] for player in pair} for turn in (0, 3, 6)]
        assert len(set.union(*idle)) == 3


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("count", [3, 7, 8])
def test_tied_group_has_no_advantages_where_ranks_are_shared(scheme: str, count: int) -> None:
    """Contract: also where someone is left out of a round."""
    rewards, _ = played(scheme, [1.0] * count, Rules(tie_policy="split_rank"))
    assert_near(advantages(rewards), [0.0] * count)


def test_who_is_left_out_of_a_swiss_round_wins_it_by_default() -> None:
    """The reference code's: of three that tie, the two left out once have 1.5 points, the third 1."""
    assert sorted(played("swiss", [1.0] * 3)[0]) == [0.0, 0.75, 0.75]


@pytest.mark.parametrize("scheme", ["anchor", "round_robin"])
def test_tied_group_of_ranked_schemes_is_zero_in_any_case(scheme: str) -> None:
    assert_near(advantages(played(scheme, [1.0] * 8)[0]), [0.0] * 8)


def test_tied_group_still_moves_under_the_reference_policy() -> None:
    """What split_rank cures: a bracket without differences has the advantages 1.43 to -1.43."""
    rewards, _ = played("seeded_single_elimination", [1.0] * 8, Rules(tie_policy="first_listed"))
    assert_near(advantages(rewards).sort(descending=True).values[:1], [1.4289], atol=1e-4)


@pytest.mark.parametrize("scheme", ["anchor", "seeded_single_elimination", "round_robin"])
def test_relabelling_permutes_and_changes_nothing_else(scheme: str) -> None:
    rewards, _ = played(scheme, Q8)
    order = [0, *Random(4).sample(range(1, 8), 7)]
    relabelled, _ = played(scheme, [Q8[entrant] for entrant in order])
    assert relabelled == pytest.approx([rewards[entrant] for entrant in order])


def test_two_entrants_are_a_match() -> None:
    for scheme in SCHEMES:
        assert played(scheme, [0.1, 0.2])[0] == (0.0, 1.0)


def test_brackets_and_byes() -> None:
    assert bracket(8) == [0, 7, 3, 4, 1, 6, 2, 5]
    seeded = [float(7 - entrant) for entrant in range(7)]
    _, protected = played("seeded_single_elimination", seeded)
    assert protected[6:9] == [(3, 4), (1, 6), (2, 5)], "the bye is the first seed's"
    _, reference = played("seeded_single_elimination", seeded, Rules(byes="reference"))
    assert reference[6:9] == [(0, 3), (4, 1), (6, 2)], "the bye goes to seed 5"
    six, _ = played("seeded_single_elimination", seeded[:6], Rules(byes="reference"))
    assert sorted(six) == pytest.approx([place / 5 for place in range(6)])


def test_dropped_matches_leave_a_ranking() -> None:
    for scheme in SCHEMES:
        rewards, _ = played(scheme, Q8, drop=lambda pair: 2 in pair)
        assert len(rewards) == 8
        assert all(math.isfinite(reward) for reward in rewards)


def test_a_dropped_match_of_a_round_robin_counts_for_nobody() -> None:
    """0 beats 2 and has no other result, 2 beats 1 and 3, 1 beats 3: shares of wins 1, 1/2, 2/3, 0. With half a win for a dropped
    match 0 and 2 would be even."""
    rounds = SCHEMES["round_robin"](4, Random(0), Rules())
    won = {(0, 1): None, (0, 2): (12.0, 8.0), (0, 3): None, (1, 2): (8.0, 12.0), (1, 3): (12.0, 8.0), (2, 3): (12.0, 8.0)}
    pairs = next(rounds)
    with pytest.raises(StopIteration) as stop:
        rounds.send([won[pair] for pair in pairs])
    assert stop.value.value == pytest.approx((1.0, 1 / 3, 2 / 3, 0.0))


def test_dropped_match_against_the_anchor_is_a_tie_with_it() -> None:
    """Contract: nobody is ranked last because a judgment failed. s = (14, dropped, 10, 8), the anchor's being its mean."""
    qualities = [0.0, -9.0, -2.0, -4.0]
    rewards, _ = played("anchor", qualities, drop=lambda pair: 1 in pair)
    assert rewards == pytest.approx((1.0, 1.0, 1 / 3, 0.0))
    none, _ = played("anchor", qualities, drop=lambda _: True)
    assert none == (0.0, 0.0, 0.0, 0.0), "all are equal"
    bracket, _ = played("seeded_single_elimination", [0.0, 3.0, -2.0, -4.0], drop=lambda pair: pair == (0, 1))
    assert bracket[1] > bracket[2] > bracket[3], "seeded with the anchor"


def test_single_entrant_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size"):
        quantile_rewards([0])


def test_joined_ties() -> None:
    assert joined([(0, 1), (2, 3), (1, 2), (5, 6)]) == [{0, 1, 2, 3}, {5, 6}]
