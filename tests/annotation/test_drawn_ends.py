"""Terminal actions drawn by eager expansion, and rollouts that are not kept as nodes, count in values, limits and pairs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from tabular import SIGNED, grow

from stages.annotation.labels import label_rows
from stages.annotation.pairs import pair_rows
from stages.annotation.plans import eager
from stages.annotation.requests import ValueRequest
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree

EAGER: dict[str, Any] = {"expansion": {"kind": "eager"}, "labels": {"q": "tree"}}
MODEL: dict[str, Any] = {**EAGER, "evaluation": {"kind": "value_model"}}
REST_MCTS: dict[str, Any] = {
    **MODEL,
    "expand_k": 3,
    "selection": {"rule": "uct_2ln", "c": 0.7, "unvisited": "bonus"},
    "evaluation": {"kind": "value_model", "lookahead": 3},
    "backup": "children_mean",
    "stop": {"value": 0.9},
}
ROOT = Edge("", (), (), "", (20,), 0.0, False, False, "")


def edge(token: int, reward: float = 0.0, end: bool = False) -> Edge:
    return Edge(str(token), (token,), (-0.5,), "", () if end else (11,), reward, end, False, "" if end else str(token))


@pytest.mark.parametrize(("backup", "expected"), [("mean", (1.0 + 19 * 0.3) / 20), ("max", 1.0)])
def test_drawn_success_counts_in_values(backup: str, expected: float):
    """Contract: the root draws a success and an open action, the model values everything 0.3: one of 20 visits is the
    success's."""
    tree = Tree("t", ROOT, Annotate(iterations=20, expand_k=2, backup=backup, **MODEL))
    plan = eager(tree)
    work, drawn = next(plan), 0
    with suppress(StopIteration):
        while True:
            results = []
            if isinstance(work, ValueRequest):
                for node in work.nodes:
                    tree.nodes[node].model_value = 0.3
            else:
                for play in work:
                    drawn += 1
                    results.append([edge(drawn, 1.0, end=True) if (play.start, play.number) == (0, 0) else edge(drawn)])
            work = plan.send(results)
    root, win = tree.nodes[0], tree.nodes[1]
    assert (win.N, win.value, win.n_rollouts, win.n_success) == (1, 1.0, 1, 1)
    assert root.N == 20
    assert root.value == pytest.approx(expected)
    assert tree.counters["known_ends"] == 1
    assert {label["node"]: label["q"] for label in label_rows(tree.rows(), tree.params)}[0] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["rollout", "mixed", "value_model"])
def test_every_drawn_terminal_is_visited(kind: str):
    """Contract: under unvisited: first, a node with more visits than children has visited each child, terminal ones too."""
    ends, settings = 0, {**EAGER, "evaluation": {"kind": kind}, "iterations": 60, "expand_k": 5}
    for world in (3, 5):
        for tree in grow(["a", "b"], world=world, kind="sure", **settings):
            for node in tree.nodes:
                below = [tree.nodes[child] for child in node.children if tree.nodes[child].ended]
                if node.drawn and len(node.children) < node.N:
                    assert all(child.N for child in below)
                    ends += len(below)
    assert ends > 20


def test_terminals_are_visited_under_unvisited_zero():
    """Contract: rStar-Math scores children without visits 0, but terminal ones are backed up before their siblings."""
    settings = {**EAGER, **SIGNED, "selection": {"c": 2.0, "unvisited": "zero"}, "expand_k": 8, "cut_return": -1.0}
    for tree in grow(["a", "b", "c"], kind="sure", world=3, iterations=40, **settings):
        for node in tree.nodes:
            below = [tree.nodes[child] for child in node.children]
            if any(child.N and not child.ended for child in below):
                assert all(child.N for child in below if child.ended)


def test_terminal_that_ends_the_tree_counts_in_values():
    """Contract: stop.value considers backed-up terminal nodes, so the success that ends ReST-MCTS*'s tree counts in its
    values."""
    finished = 0
    for tree in grow([f"t{number}" for number in range(4)], kind="sure", world=3, iterations=50, **REST_MCTS):
        right = [node for node in tree.nodes if node.ended and node.succeeded]
        if tree.iterations < 50:
            assert sum(node.N for node in right) == 1
            finished += 1
    assert finished


DISCARDED: dict[str, Any] = {**EAGER, "evaluation": {"keep_rollouts": False}}


def test_success_of_discarded_rollout_ends_the_tree():
    """Contract: with keep_rollouts: false the first success is that of the first successful rollout, and stop.on_success ends the
    tree with it."""
    tree = Tree("t", ROOT, Annotate(**DISCARDED))
    tree.draw(0, [edge(1), edge(2)], 1)
    tree.insert(1, [edge(3), edge(4, 0.0, end=True)], 1)
    assert tree.first_success is None
    tree.insert(2, [edge(5), edge(6, 1.0, end=True)], 2)
    assert (tree.first_success, len(tree.nodes)) == (2, 3)
    stopped = 0
    for tree in grow([f"t{number}" for number in range(4)], iterations=40, stop={"on_success": True}, **DISCARDED):
        wins = sum(node.n_success for node in tree.nodes if not (node.ended and not node.N))
        assert (tree.first_success == tree.iterations) == (tree.iterations < 40 or wins > 0)
        stopped += tree.iterations < 40
    assert stopped


def test_outcome_gate_counts_discarded_rollouts():
    """Contract: outcome_gate needs a successful rollout through the winner and a failed one through the loser."""
    tree = Tree("t", ROOT, Annotate(**DISCARDED, pairs={"min_margin": 0.5, "min_visits": 2}))
    tree.draw(0, [edge(1), edge(2), edge(3)], 1)
    for number, (start, outcome) in enumerate([(1, 1.0), (1, 1.0), (2, 0.0), (2, 1.0), (3, 0.0), (3, 0.0)], start=10):
        tree.insert(start, [edge(number, outcome, end=True)], number)
    pairs = pair_rows(tree.rows(), tree.params)
    assert [(pair["win"], pair["lose"]) for pair in pairs] == [(1, 3), (1, 2), (2, 3)]
    right = Tree("t", ROOT, tree.params)
    right.draw(0, [edge(1), edge(2)], 1)
    for start, outcome in ((1, 1.0), (1, 1.0), (2, 1.0), (2, 1.0)):
        right.insert(start, [edge(9, outcome, end=True)], 1)
    right.nodes[2].W = 0.0
    assert pair_rows(right.rows(), right.params) == [], "no rollout through the loser failed"
