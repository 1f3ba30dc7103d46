"""Scores of children: the published forms with their hand-computed numbers, ties, unvisited children, limits of c."""

import math

import pytest

from stages.annotation.selection import Arm, scores, select, softmax, uct
from stages.params import Annotate

ARMS = [Arm(0.2, 3, -1.0), Arm(0.7, 5, -0.5), Arm(0.7, 5, -2.0), Arm(0.1, 1, -0.1)]


def test_published_uct_numbers():
    """Contract: W = 2, N = 4, N_p = 10: 2.0174 with c = 2 (ln form), 1.2511 with c = 0.7 (2 ln form)."""
    assert uct(0.5, 4, 10, 2.0) == pytest.approx(2.0174, abs=5e-5)
    (score,) = scores([Arm(0.5, 4, 0.0)], 10, Annotate(selection={"rule": "uct_2ln", "c": 0.7}))
    assert score == pytest.approx(1.2511, abs=5e-5)


def test_puct_by_hand():
    """Contract: Q + c P sqrt(N_p) / (1 + N) with P the softmax of length-normalised log-probabilities over the temperature."""
    arms = [Arm(0.5, 1, math.log(0.8)), Arm(0.5, 3, math.log(0.2))]
    assert scores(arms, 4, Annotate(selection={"rule": "puct", "c": 2.0})) == pytest.approx(
        [0.5 + 2 * 0.8 * 2 / 2, 0.5 + 2 * 0.2 * 2 / 4]
    )
    flat = scores(arms, 4, Annotate(selection={"rule": "puct", "c": 2.0, "prior_temperature": 1e6}))
    assert flat == pytest.approx([0.5 + 1.0, 0.5 + 0.5], abs=1e-5)
    assert sum(softmax([-900.0, -901.0], 1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", ["uct", "uct_2ln"])
def test_unvisited_children_come_first(rule: str):
    """Contract: under UCT an unvisited child is taken before any visited one, the first of several."""
    arms = [*ARMS, Arm(0.0, 0, -9.0), Arm(0.0, 0, -0.1)]
    assert select(arms, 14, Annotate(selection={"rule": rule, "c": 0.1})) == 4


@pytest.mark.parametrize("rule", ["uct", "uct_2ln", "puct"])
def test_c_zero_is_greedy_and_ties_go_to_the_first(rule: str):
    """Contract: c = 0 takes the highest Q; of equal scores the first child wins."""
    assert select(ARMS, 14, Annotate(selection={"rule": rule, "c": 0.0})) == 1


def test_large_c_evens_out_visits():
    """Contract: c -> infinity visits children uniformly, whatever their Q."""
    visits = [1, 1, 1, 1]
    for total in range(4, 40):
        arms = [Arm(q, n, 0.0) for q, n in zip([0.0, 1.0, 0.3, 0.9], visits, strict=True)]
        visits[select(arms, total, Annotate(selection={"c": 1e9}))] += 1
    assert visits == [10, 10, 10, 10]
