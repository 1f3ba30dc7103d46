"""Labels and pairs: hand-computed values, gates, and that they follow from the stored nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tabular import ROOT, grow

from stages.annotation.labels import (
    LABEL_SCHEMA,
    best_values,
    first_error,
    hard,
    label_rows,
    min_max,
    node_q,
    process_values,
    standard_error,
    steps_to,
    success_rate,
)
from stages.annotation.nodes import trees_of
from stages.annotation.pairs import PAIR_SCHEMA, best_path, edit_distance, pair_rows
from stages.annotation.paths import value_paths
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree
from stages.records.episode import NODE_SCHEMA, read_rows, write_table


def row(node: int, parent: int, n: int = 4, c: int = 0, end: bool = False, **changes: Any) -> dict[str, Any]:
    """`c` of `n` rollouts through the node succeeded."""
    base = {"task_id": "t", "node": node, "parent": parent, "depth": 0, "action": f"go {node}", "N": n, "W": float(c)}
    base |= {"n_success": c, "n_rollouts": n, "reward": float(end and c > 0), "terminal": end, "truncated": False}
    base |= dict.fromkeys(("R", "R2"), 0.0 if end else float(c))
    return {**base, **changes}


def test_soft_and_hard_labels():
    """Contract: 3 of 8 rollouts correct -> soft 0.375, hard 1; 0 of 8 -> 0, 0."""
    assert (success_rate(row(1, 0, 8, 3)), hard(row(1, 0, 8, 3))) == (0.375, 1)
    assert (success_rate(row(1, 0, 8, 0)), hard(row(1, 0, 8, 0))) == (0.0, 0)
    assert standard_error(row(1, 0, 8, 0)) > 0.1
    assert standard_error(row(1, 0, 8, 0, end=True)) == 0.0


def test_process_values_of_rest_mcts():
    """Contract: 1/3, 2/3, 1 on a correct path of 3 steps; 1/9 for a wrong leaf at depth 2 below its first node."""
    tree = [row(0, -1), row(1, 0, 4, 1), row(2, 1, 2, 1), row(3, 2, 1, 1, end=True), row(4, 1, 1, 0, end=True)]
    assert process_values(tree) == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0, 1 / 9])
    assert steps_to(tree, success=True) == [3, 2, 1, 0, None]
    assert steps_to(tree, success=False) == [2, 1, None, None, 0]
    assert process_values([row(0, -1), row(1, 0), row(2, 1, end=True)]) == [0.0, 0.0, 0.0]


def test_advantage_is_q_minus_parent_q():
    """Contract: null for the root and under a parent without label; nodes with few visits have no label."""
    tree = [row(0, -1, 8, 4), row(1, 0, 4, 3), row(2, 0, 1, 1), row(3, 1, 2, 2, end=True)]
    labels = {label["node"]: label for label in label_rows(tree, Annotate(labels={"min_visits": 2, "pool": False}))}
    assert sorted(labels) == [0, 1, 3]
    assert labels[0]["advantage"] is None
    assert labels[1]["advantage"] == 0.25
    assert labels[3]["advantage"] == 0.25
    by_tree = label_rows(tree, Annotate(labels={"q": "tree"}))
    assert [label["q"] for label in by_tree] == [label["q_tree"] for label in by_tree]


def siblings(*counts: tuple[int, int], **changes: Any) -> list[dict[str, Any]]:
    """A root with one child per (rollouts, successes), each with the terminal nodes that its counts imply."""
    rows = [row(0, -1, sum(n for n, _ in counts), sum(c for _, c in counts))]
    rows += [row(number, 0, n, c) for number, (n, c) in enumerate(counts, start=1)]
    for number, (n, c) in enumerate(counts, start=1):
        rows += [row(len(rows), number, c, c, end=True)] * (c > 0)
        rows += [row(len(rows), number, n - c, 0, end=True)] * (n > c)
    return rows


def root_pairs(rows: list[dict[str, Any]], **pairs: Any) -> list[tuple[int, int, int, float]]:
    found = pair_rows(rows, Annotate(pairs=pairs))
    return [(pair["parent"], pair["win"], pair["lose"], pair["weight"]) for pair in found if pair["parent"] == 0]


def test_top_bottom_pairs():
    """Contract: the best `top` against the worst `bottom`, each pair weighted 1 / (winners x losers) of those that are in a
    pair."""
    rows = siblings((4, 4), (4, 1), (4, 3), (4, 0))
    assert root_pairs(rows, min_margin=0.25) == [(0, 1, 4, 0.25), (0, 1, 2, 0.25), (0, 3, 4, 0.25), (0, 3, 2, 0.25)]
    assert root_pairs(rows, min_margin=0.9) == [(0, 1, 4, 1.0)]
    assert root_pairs(rows, top=1, bottom=1) == [(0, 1, 4, 1.0)]


def test_pairs_need_visits_a_margin_and_both_outcomes():
    """Contract: no pair with N < min_visits, margin < min_margin or 0, equal actions, or without a success and a failure."""
    assert root_pairs(siblings((1, 1), (4, 0)), min_visits=2) == []
    assert root_pairs(siblings((4, 2), (4, 2)), min_margin=0.0) == []
    assert root_pairs(siblings((4, 3), (4, 2)), min_margin=0.5) == []
    assert root_pairs(siblings((4, 0), (4, 0))) == []
    assert root_pairs(siblings((4, 4), (4, 4))) == []
    same = siblings((4, 4), (4, 0))
    same[1]["action"], same[2]["action"] = "Go  north", "go north"
    assert root_pairs(same) == []


@pytest.mark.parametrize("rule", ["top_bottom", "threshold", "best_path"])
@pytest.mark.parametrize("q", ["rollout", "tree"])
def test_labels_and_pairs_follow_from_the_stored_nodes(tmp_path, q: str, rule: str):
    """Contract: labels and pairs from the stored file equal those of the live run; under every rule pairs respect parents and
    gates."""
    gates = {"rule": rule, "min_margin": 0.2, "min_visits": 3}
    params = Annotate(iterations=80, expand_k=4, backup="max", labels={"q": q}, pairs=gates)
    trees = grow([f"t{number}" for number in range(6)], iterations=80, expand_k=4, backup="max")
    live = [item for tree in trees for item in tree.rows()]
    write_table(tmp_path / "nodes.parquet", NODE_SCHEMA, live)
    stored = read_rows(tmp_path / "nodes.parquet")
    assert label_rows(stored, params) == label_rows(live, params) != []
    pairs = pair_rows(stored, params)
    assert pairs == pair_rows(live, params) != []
    nodes = trees_of(stored)
    for pair in pairs:
        tree = nodes[pair["task_id"]]
        assert tree[pair["win"]]["parent"] == tree[pair["lose"]]["parent"] == pair["parent"]
        assert pair["margin"] >= 0.2
        assert min(pair["n_win"], pair["n_lose"]) >= 3
    by_parent: dict[tuple[str, int], float] = {}
    for pair in pairs:
        key = pair["task_id"], pair["parent"]
        by_parent[key] = by_parent.get(key, 0.0) + pair["weight"]
    assert max(by_parent.values()) <= 1.0 + 1e-9
    for name, schema, rows in (("labels", LABEL_SCHEMA, label_rows(stored, params)), ("pairs", PAIR_SCHEMA, pairs)):
        write_table(tmp_path / f"{name}.parquet", schema, rows)
        assert read_rows(tmp_path / f"{name}.parquet") == rows


def test_missing_node_raises():
    """Contract: a stored tree with a missing node is rejected, not labelled."""
    with pytest.raises(ValueError, match="task t are not numbered"):
        label_rows([row(0, -1), row(2, 0)], Annotate())


def test_best_values_follow_the_qlass_recursion():
    """Contract: reward 1 two steps below, gamma 0.9: 0.81, 0.9, 1, whatever the search backed up; then min-max scaling."""
    tree = [row(0, -1), row(1, 0), row(2, 1), row(3, 2, 4, 4, end=True), row(4, 1, 1, 0, end=True)]
    assert best_values(tree, 0.9)[1:] == pytest.approx([0.81, 0.9, 1.0, 0.0])
    assert min_max([0.2, 0.6, 1.0], 0.2, 1.0) == pytest.approx([0.0, 0.5, 1.0])
    assert min_max([0.4, 0.4], 0.4, 0.4) == [0.0, 0.0]
    params = Annotate(gamma=0.9, labels={"q": "best", "scale": "min_max", "min_visits": 1})
    assert [label["q"] for label in label_rows(tree, params)] == pytest.approx([0.729, 0.81, 0.9, 1.0, 0.0])


@pytest.mark.parametrize(("q", "expected"), [("rollout", 0.25), ("hard", 1.0), ("tree", 0.5), ("best", 1.0), ("process", 0.5)])
def test_every_definition_of_the_label(q: str, expected: float):
    """Contract: `labels.q` selects soft, hard, tree, best or process values; advantages are differences of these."""
    tree = [row(0, -1, 8, 2), row(1, 0, 4, 1, W=2.0), row(2, 1, 1, 1, end=True)]
    labels = label_rows(tree, Annotate(labels={"q": q, "min_visits": 1}))
    assert labels[1]["q"] == pytest.approx(expected)
    columns = {"rollout": "q_rollout", "tree": "q_tree"}
    assert [label["q"] for label in labels] == [label[columns.get(q, q)] for label in labels], "each definition has a column"
    assert labels[1]["advantage"] == pytest.approx(expected - labels[0]["q"])


def test_first_error_is_the_first_step_without_success():
    """Contract: of the steps to a failure, the first from which no rollout succeeded; none for a success."""
    tree = [row(0, -1, c=1), row(1, 0, c=1), row(2, 1), row(3, 2, end=True), row(4, 1, c=1, end=True)]
    assert first_error(tree, 3) == 2
    assert first_error(tree, 4) is None


def test_threshold_and_best_path_pairs():
    """Contract: threshold pairs all siblings that differ by more than the margin, each parent's weights summing to 1; best_path
    pairs the action on the best path with the worst visited sibling."""
    rows = siblings((4, 3), (4, 2), (4, 1))
    rows.append(row(len(rows), 0, 0, 0))
    assert root_pairs(rows, rule="threshold", min_margin=0.2, outcome_gate=False) == [
        (0, 1, 3, 1 / 3),
        (0, 1, 2, 1 / 3),
        (0, 2, 3, 1 / 3),
    ]
    assert root_pairs(rows, rule="threshold", min_margin=0.25) == [(0, 1, 3, 1.0)]
    assert root_pairs(rows, rule="best_path", min_margin=0.0, min_visits=1) == [(0, 1, 3, 1.0)]
    assert root_pairs(siblings((4, 4), (4, 4)), rule="best_path", min_margin=0.0) == [], "all outcomes are equal"


def test_best_path_pairs_with_the_worst_visited_sibling():
    """Children of Q 0.8 (on the best path), 0.5, 0.2 and unvisited: 0.8 against 0.2, never against the unvisited one."""
    rows = siblings((10, 8), (10, 5), (10, 2))
    rows.append(row(len(rows), 0, 0, 0))
    assert root_pairs(rows, rule="best_path", min_margin=0.0, min_visits=1) == [(0, 1, 3, 1.0)]
    pairs = pair_rows(rows, Annotate(pairs={"rule": "best_path", "min_margin": 0.0, "min_visits": 1}))
    assert [pair["margin"] for pair in pairs if pair["parent"] == 0] == [pytest.approx(0.6)]


def test_best_path_with_lower_q_makes_no_pair():
    """Contract: winners of best_path are chosen by outcome; if their Q is not above the sibling's there is no pair."""
    rows = siblings((4, 1), (4, 3))
    for item in rows:
        item["reward"] = 1.5 if item["parent"] == 1 and item["n_success"] else item["reward"]
    assert root_pairs(rows, rule="best_path", min_margin=0.0) == []
    assert best_path(rows, [0.0] * len(rows)) == [0, 1, 3]


def test_lone_side_edit_distance_and_continuation():
    """Contract: a single winner or loser is paired with up to `lone` of the other side; actions closer than min_edit_distance are
    no pair; with `continuation` the rest of the winner's path must be better, too."""
    rows = siblings((4, 4), (4, 0), (4, 0), (4, 0), (4, 0), (4, 0))
    assert len(root_pairs(rows)) == 2
    assert len(root_pairs(rows, lone=4)) == 4
    assert root_pairs(siblings((4, 4), (4, 0)), min_edit_distance=2) == [], "go 1 and go 2 differ by a character"
    assert edit_distance("kitten", "sitting", 20) == 3
    assert edit_distance("kitten", "sitting", 2) == 2
    assert edit_distance("same", "same", 5) == 0
    rows = siblings((4, 2), (4, 1))
    assert len(root_pairs(rows, min_margin=0.25)) == 1
    assert len(root_pairs(rows, min_margin=0.25, continuation=True)) == 1
    rows[5]["reward"] = 2.0
    assert root_pairs(rows, min_margin=0.25, continuation=True) == []


def test_node_without_rollouts_has_no_rollout_label():
    """Contract: under eager expansion inner nodes may have visits but no rollouts of their own."""
    params = Annotate(expansion={"kind": "eager"}, labels={"min_visits": 1})
    tree = [row(0, -1, 4, 2, n_rollouts=0, n_success=0), row(1, 0, 4, 2), row(2, 1, 1, 1, end=True)]
    stored = [{**item, "drawn": item["node"] < 2, "model_value": None} for item in tree]
    assert [label["node"] for label in label_rows(stored, params)] == [1, 2]


@pytest.mark.parametrize("q", ["rollout", "tree", "best"])
def test_scaling_ignores_nodes_without_an_outcome(q: str):
    """Contract: returns -4 and -6 scale to 1 and 0 also where a sibling was drawn and never visited, whose q of 0 is none."""
    params = Annotate(
        returns=[-6.0, 0.0],
        reward_range=[-1.0, 1.0] if q == "tree" else [0.0, 1.0],
        expansion={"kind": "eager"},
        labels={"q": q, "scale": "min_max", "min_visits": 1, **({"pool": False} if q == "rollout" else {})},
        pairs={"min_visits": 1, "outcome_gate": False},
    )
    tree = Tree("t", ROOT, params)
    good, bad, unvisited = (edge("a", -4.0), edge("b", -6.0), replace(edge("c", 0.0), terminal=False, context_ids=(9,)))
    first, second, _ = tree.draw(0, [good, bad, unvisited], 1)
    tree.insert(first, [], 1)
    tree.insert(second, [], 2)
    assert [node_q(tree.rows(), params)[node] for node in (first, second)] == pytest.approx([1.0, 0.0])
    assert {label["node"]: label["q"] for label in label_rows(tree.rows(), params) if label["node"]} == {1: 1.0, 2: 0.0}
    assert [(pair["win"], pair["lose"], pair["margin"]) for pair in pair_rows(tree.rows(), params)] == [(1, 2, 1.0)]


def edge(text: str, reward: float) -> Edge:
    """An action that ends the episode."""
    return Edge(text, (ord(text),), (-0.5,), "", (), reward, True, False, "", success=0.0)


@pytest.mark.parametrize(("backup", "gamma"), [("mean", 1.0), ("discounted_max", 0.5)])
def test_critic_ranks_siblings_and_changes_no_return(backup: str, gamma: float):
    """Contract: Agent Q's 1/rank decides pairs and Q-models; labels, advantages and the value model's targets are returns without
    it."""
    shared: dict[str, Any] = {"backup": backup, "gamma": gamma, "expansion": {"kind": "eager"}, "labels": {"q": "tree"}}
    ranked, plain = (Annotate(**shared, evaluation={"critic": critic}) for critic in ("prior", "none"))
    trees = grow(["a", "b"], iterations=15, expand_k=3, selection={"rule": "uct_1p"}, evaluation={"critic": "prior"}, **shared)
    rows = [item for tree in trees for item in tree.rows()]
    assert label_rows(rows, ranked) == label_rows(rows, plain)
    assert value_paths(rows, ranked) == value_paths(rows, plain)
    assert [label["q"] for label in label_rows(rows, ranked)] == [label["q_tree"] for label in label_rows(rows, ranked)]
    tree = trees[0].rows()
    children = trees[0].nodes[0].children
    q, own = node_q(tree, ranked), node_q(tree, plain)
    assert max(q[child] for child in children) >= 0.5 > max(own[child] for child in children)
    best = max(children, key=lambda child: tree[child]["prior"])
    assert q[best] == pytest.approx((own[best] + 1.0) / 2)
