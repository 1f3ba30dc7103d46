"""The report on the trees: sizes, cost, depth and visits, labels and pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.annotation.nodes import ended, first_rollouts, trees_of

if TYPE_CHECKING:
    from stages.annotation.forest import Forest


def summary(
    forest: Forest, labels: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], difficulty: Mapping[str, float]
) -> dict[str, Any]:
    """The stage's report, except for the fitted models."""
    trees = trees_of(forest.rows)
    inner = [row for tree in trees.values() for row in tree if not ended(row)]
    ends = [row for tree in trees.values() for row in tree if ended(row)]
    roots = [tree[0] for tree in trees.values()]
    first = [row for tree in trees.values() for row in first_rollouts(tree)]
    children = Counter((row["task_id"], row["parent"]) for row in forest.rows if row["node"])
    return {
        "trees": len(trees),
        **({"middling_tasks": sum(0.0 < difficulty.get(task, -1.0) < 1.0 for task in trees)} if difficulty else {}),
        "nodes": len(forest.rows),
        "ends": {
            "correct": sum(row["n_success"] > 0 for row in ends),
            "wrong": sum(row["terminal"] and not row["n_success"] for row in ends),
            "truncated": sum(row["truncated"] for row in ends),
        },
        **forest.total_costs,
        "root_success": _share([(row["n_success"], row["n_rollouts"]) for row in first]),
        "root_tree_value": sum(row["W"] for row in roots) / max(1, sum(row["N"] for row in roots)),
        "solved_trees": sum(any(row["n_success"] for row in tree) for tree in trees.values()),
        "depth": {
            "mean_end": sum(row["depth"] for row in ends) / max(1, len(ends)),
            "max": max(row["depth"] for row in forest.rows),
            "nodes": _counts(row["depth"] for row in forest.rows),
        },
        "visits": {
            "mean": sum(row["N"] for row in inner) / max(1, len(inner)),
            "nodes": _counts(row["N"] for row in inner),
        },
        "children": _counts(children.values()),
        "labels": {
            "count": len(labels),
            "hard_share": _share([(label["hard"], 1) for label in labels]),
            "mean_q": _share([(label["q"], 1) for label in labels]),
            "with_advantage": sum(label["advantage"] is not None for label in labels),
            "nonzero_advantage": sum(bool(label["advantage"]) for label in labels),
        },
        "pairs": {
            "count": len(pairs),
            "parents": len({(pair["task_id"], pair["parent"]) for pair in pairs}),
            "task_share": len({pair["task_id"] for pair in pairs}) / len(trees),
            "mean_margin": _share([(pair["margin"], 1) for pair in pairs]),
        },
    }


def _share(parts: Sequence[tuple[float, float]]) -> float:
    total = sum(count for _, count in parts)
    return sum(part for part, _ in parts) / total if total else 0.0


def _counts(values: Any) -> dict[str, int]:
    """Number of occurrences of each value, in order of value."""
    return {str(value): count for value, count in sorted(Counter(values).items())}
