"""Labels and pairs: hand-computed values, gates, and that they follow from the stored nodes alone."""

from __future__ import annotations

from typing import Any

import pytest
from tabular import grow

from stages.agent.episode import NODE_SCHEMA, read_rows, write_table
from stages.annotation.labels import LABEL_SCHEMA, hard, label_rows, process_values, soft, standard_error, steps_to
from stages.annotation.pairs import PAIR_SCHEMA, pair_rows
from stages.annotation.tree import trees_of
from stages.params import Annotate


def row(node: int, parent: int, n: int = 4, c: int = 0, end: bool = False, **changes: Any) -> dict[str, Any]:
    """`c` of `n` rollouts through the node succeeded."""
    base = {"task_id": "t", "node": node, "parent": parent, "depth": 0, "action": f"go {node}", "N": n, "W": float(c)}
    base |= {"n_success": c, "n_rollouts": n, "reward": float(end and c > 0), "terminal": end, "truncated": False}
    return {**base, **changes}


def test_soft_and_hard_labels():
    """Contract: 3 of 8 rollouts correct -> soft 0.375, hard 1; 0 of 8 -> 0, 0."""
    assert (soft(row(1, 0, 8, 3)), hard(row(1, 0, 8, 3))) == (0.375, 1)
    assert (soft(row(1, 0, 8, 0)), hard(row(1, 0, 8, 0))) == (0.0, 0)
    assert standard_error(row(1, 0, 8, 0)) > 0.1
    assert standard_error(row(1, 0, 8, 0, end=True)) == 0.0


def test_process_values_of_rest_mcts():
    """Contract: 1/3, 2/3, 1 on a correct path of 3 steps; 1/9 for a wrong leaf at depth 2 below its first node."""
    tree = [row(0, -1), row(1, 0, 4, 1), row(2, 1, 2, 1), row(3, 2, 1, 1, end=True), row(4, 1, 1, 0, end=True)]
    assert process_values(tree) == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0, 1 / 9])
    assert steps_to(tree, success=True) == [3, 2, 1, 0, None]
    assert steps_to(tree, success=False) == [2, 1, None, None, 0]
    assert process_values([row(0, -1), row(1, 0), row(2, 1, end=True)]) == [0.0, 0.0, 0.0]


def test_advantage_is_q_minus_the_parents():
    """Contract: advantage = Q(node) - Q(parent), null for the root and under a parent without label; few visits, no label."""
    tree = [row(0, -1, 8, 4), row(1, 0, 4, 3), row(2, 0, 1, 1), row(3, 1, 2, 2, end=True)]
    labels = {label["node"]: label for label in label_rows(tree, Annotate(labels={"min_visits": 2}))}
    assert sorted(labels) == [0, 1, 3]
    assert labels[0]["advantage"] is None
    assert labels[1]["advantage"] == 0.25
    assert labels[3]["advantage"] == 0.25
    by_tree = label_rows(tree, Annotate(labels={"q": "tree"}))
    assert [label["q"] for label in by_tree] == [label["q_tree"] for label in by_tree]


def siblings(*counts: tuple[int, int], **changes: Any) -> list[dict[str, Any]]:
    """A root with one child per (rollouts, successes), each with the ends that its counts imply."""
    rows = [row(0, -1, sum(n for n, _ in counts), sum(c for _, c in counts))]
    rows += [row(number, 0, n, c) for number, (n, c) in enumerate(counts, start=1)]
    for number, (n, c) in enumerate(counts, start=1):
        rows += [row(len(rows), number, c, c, end=True)] * (c > 0)
        rows += [row(len(rows), number, n - c, 0, end=True)] * (n > c)
    return rows


def found(rows: list[dict[str, Any]], **pairs: Any) -> list[tuple[int, int, int, float]]:
    made = pair_rows(rows, Annotate(pairs=pairs))
    return [(pair["parent"], pair["win"], pair["lose"], pair["weight"]) for pair in made if pair["parent"] == 0]


def test_pairs_by_top_and_bottom():
    """Contract: the best `top` against the worst `bottom`, weight 1 / (winners x losers) of those that are in a pair."""
    rows = siblings((4, 4), (4, 1), (4, 3), (4, 0))
    assert found(rows, min_margin=0.25) == [(0, 1, 4, 0.25), (0, 1, 2, 0.25), (0, 3, 4, 0.25), (0, 3, 2, 0.25)]
    assert found(rows, min_margin=0.9) == [(0, 1, 4, 1.0)]
    assert found(rows, top=1, bottom=1) == [(0, 1, 4, 1.0)]


def test_pairs_need_visits_a_margin_and_ends():
    """Contract: no pair with N < min_visits, margin < min_margin or 0, equal actions, or without a right and a wrong end."""
    assert found(siblings((1, 1), (4, 0)), min_visits=2) == []
    assert found(siblings((4, 2), (4, 2)), min_margin=0.0) == []
    assert found(siblings((4, 3), (4, 2)), min_margin=0.5) == []
    assert found(siblings((4, 0), (4, 0))) == []
    assert found(siblings((4, 4), (4, 4))) == []
    same = siblings((4, 4), (4, 0))
    same[1]["action"], same[2]["action"] = "Go  north", "go north"
    assert found(same) == []


@pytest.mark.parametrize("q", ["rollout", "tree"])
def test_labels_and_pairs_follow_from_the_stored_nodes(tmp_path, q: str):
    """Contract: labels and pairs made from the stored file equal those of the live run; no pair crosses parents or a gate."""
    params = Annotate(iterations=80, expand_k=4, backup="max", labels={"q": q}, pairs={"min_margin": 0.2, "min_visits": 3})
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


def test_a_gap_in_the_nodes_is_an_error():
    """Contract: a stored tree with a node missing is refused, not labelled."""
    with pytest.raises(ValueError, match="task t are not numbered"):
        label_rows([row(0, -1), row(2, 0)], Annotate())
