"""Scores of children: published formulas with hand-computed numbers, ties, unvisited children, limits of c."""

import math

import pytest
from tabular import SIGNED

from stages.annotation.backup import mix_critic
from stages.annotation.selection import (
    Arm,
    critic_ranks,
    exploration,
    mixed,
    omega_score,
    scores,
    select,
    softmax,
    uct,
    virtual,
)
from stages.annotation.settings import Annotate, OmegaScore
from stages.annotation.tree import Edge, Tree
from stages.seeding import stream

ARMS = [Arm(0.2, 3, -1.0), Arm(0.7, 5, -0.5), Arm(0.7, 5, -2.0), Arm(0.1, 1, -0.1)]


def test_uct_scores():
    """Contract: W = 2, N = 4, N_p = 10: 2.0174 with c = 2 (ln form), 1.2511 with c = 0.7 (2 ln form)."""
    assert uct(0.5, 4, 10, 2.0) == pytest.approx(2.0174, abs=5e-5)
    (score,) = scores([Arm(0.5, 4, 0.0)], 10, Annotate(selection={"rule": "uct_2ln", "c": 0.7}))
    assert score == pytest.approx(1.2511, abs=5e-5)


def test_puct_scores():
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
    """Contract: UCT selects an unvisited child before any visited one, the first of several."""
    arms = [*ARMS, Arm(0.0, 0, -9.0), Arm(0.0, 0, -0.1)]
    assert select(arms, 14, Annotate(selection={"rule": rule, "c": 0.1})) == 4


@pytest.mark.parametrize("rule", ["uct", "uct_2ln", "puct"])
def test_c_zero_is_greedy_and_ties_go_to_the_first(rule: str):
    """Contract: c = 0 takes the highest Q; of equal scores the first child wins."""
    assert select(ARMS, 14, Annotate(selection={"rule": rule, "c": 0.0})) == 1


def test_large_c_evens_out_visits():
    """Contract: for c -> infinity children are visited uniformly, whatever their Q."""
    visits = [1, 1, 1, 1]
    for total in range(4, 40):
        arms = [Arm(q, n, 0.0) for q, n in zip([0.0, 1.0, 0.3, 0.9], visits, strict=True)]
        visits[select(arms, total, Annotate(selection={"c": 1e9}))] += 1
    assert visits == [10, 10, 10, 10]


def test_uct_1p_and_unvisited_scores():
    """Contract: Agent Q's form divides by 1 + n; unvisited children score 0, their value, or their value + 1."""
    (score,) = scores([Arm(0.5, 4, 0.0)], 10, Annotate(selection={"rule": "uct_1p", "c": 1.0}))
    assert score == pytest.approx(0.5 + math.sqrt(math.log(10) / 5))
    arms = [Arm(0.5, 4, 0.0), Arm(0.3, 0, 0.0)]
    for unvisited, expected in (("zero", 0.0), ("value", 0.3), ("bonus", 1.3)):
        assert scores(arms, 4, with_unvisited(unvisited))[1] == pytest.approx(expected)
    assert scores(arms, 4, with_unvisited("first"))[1] == math.inf
    assert select(arms, 4, with_unvisited("zero")) == 0, "with score 0, unvisited siblings of positive ones starve"


def with_unvisited(unvisited: str) -> Annotate:
    model = {"expansion": {"kind": "eager"}, "evaluation": {"kind": "value_model"}, "labels": {"q": "tree"}}
    return Annotate(selection={"c": 0.1, "unvisited": unvisited}, **model)


def test_random_unvisited_children_come_first():
    """Contract: rStar selects any child without visits before all others; each choice has its own random stream."""
    arms = [Arm(0.9, 9, 0.0), Arm(0.0, 0, 0.0), Arm(0.0, 0, 0.0)]
    params = Annotate(expansion={"kind": "eager"}, selection={"unvisited": "random"})
    chosen = {select(arms, 9, params, stream=stream("test", number)) for number in range(40)}
    assert chosen == {1, 2}


def test_exploration_decay():
    """Contract: c, or c (1 - 0.9 t / T), or c 0.1^(t / T)."""
    for decay, middle, last in (("none", 2.0, 2.0), ("linear", 1.1, 0.38), ("exponential", 2 * 0.1**0.5, 2 * 0.1**0.9)):
        params = Annotate(iterations=10, selection={"c": 2.0, "decay": decay})
        assert [exploration(params, t) for t in (0, 5, 9)] == pytest.approx([2.0, middle, last])


def test_virtual_loss_and_wu_uct():
    """Contract: W = 3, N = 5 is 0.6. One pending visit makes it 0.5 with virtual loss (on +-1: (3 - 1) / 6); WU-UCT only counts
    it. Completed with return 1 it is 4 / 6, as without."""
    arm = Arm(0.6, 5, -1.0)
    loss = virtual(Annotate(virtual="loss", leaves_per_tree=2), arm, 1)
    assert (loss.q, loss.visits) == (pytest.approx(0.5), 6)
    assert virtual(Annotate(virtual="loss", leaves_per_tree=2, **SIGNED), arm, 1).q == pytest.approx(2 / 6)
    assert virtual(Annotate(), arm, 1) == Arm(0.6, 6, -1.0)
    assert virtual(Annotate(virtual="loss", leaves_per_tree=2), arm, 0) is arm
    score = scores([virtual(Annotate(), arm, 2)], 12, Annotate(selection={"rule": "uct_2ln", "c": 1.0}))
    assert score == pytest.approx([0.6 + math.sqrt(2 * math.log(12) / 7)])
    root = Edge("", (), (), "", (20,), 0.0, False, False, "")
    tree = Tree("t", root, Annotate(virtual="loss", leaves_per_tree=2, expand_k=1))
    for token, outcome in enumerate([1.0, 1.0, 1.0, 0.0, 0.0]):
        tree.insert(0, [Edge("", (token,), (), "", (), outcome, True, False, "")], 1)
    assert tree.nodes[0].value == pytest.approx(0.6)
    tree.pend(0, 1)
    tree.pend(0, -1)
    tree.insert(0, [Edge("", (9,), (), "", (), 1.0, True, False, "")], 2)
    assert (tree.nodes[0].W, tree.nodes[0].N, tree.nodes[0].value) == (4.0, 6, pytest.approx(4 / 6))


def test_omega_score_values():
    """Contract: MC 0.75 and 100 words: 0.8234; 24 searches in all, 2 of this state: 0.2041 more."""
    assert omega_score(0.75, 100, 0, 0, OmegaScore(), 0.125) == pytest.approx(0.8234, abs=5e-5)
    assert omega_score(0.75, 100, 2, 24, OmegaScore(), 0.125) == pytest.approx(0.8234 + 0.2041, abs=1e-4)


def test_critic_mixture_and_ranks():
    """Contract: Agent Q with equal weights: Q of the search 0.4 and critic 1.0 give 0.7; ranks give 1, 1/2, 1/3."""
    assert mixed(0.4, 1.0, 0.5) == pytest.approx(0.7)
    assert critic_ranks([0.2, 0.9, 0.4]) == pytest.approx([1 / 3, 1.0, 0.5])
    assert critic_ranks([0.4, 0.4, 0.1]) == pytest.approx([1.0, 1.0, 1 / 3])
    params = Annotate(evaluation={"critic": "prior"})
    assert mix_critic([0.4, 0.4], [-0.1, -3.0], [None, None], params) == pytest.approx([0.7, 0.45])
