"""Step labels: pure functions of the stored nodes (NODE_SCHEMA), so they can be made again without searching again.

For a node (the history after a step), with c of k policy rollouts through it that succeeded:
  q_rollout  c / k, the soft Monte-Carlo label of Math-Shepherd (2312.08935) and OmegaPRM (2406.06592): Q of the policy
  hard       1 if c > 0, else 0
  q_tree     the tree's value under the backup rule: between Q of the policy and Q*
  best       QLASS (2502.02584), after the search: r + gamma * the best child's; r where nothing is known below. The best that was
             seen, not what the policy can expect
  process    ReST-MCTS* (2406.03816): v = max(0, v_parent + sign (1 - v_parent) / m), v of the root 0; sign is +1 if a correct end
             is known below, else -1; m = fewest steps to a correct end counting this one (a wrong branch takes the m of its
             nearest correct ancestor)
  q          one of these, by `annotate.labels.q`, scaled to [0, 1] within the tree under `labels.scale: min_max`;
             advantage = q(node) - q(parent)
Nodes with fewer than `min_visits` visits get no label. A visit to a node that is not expanded is a policy rollout, so the gate
bounds k from below as well (by expand_k at most); an end needs no rollouts to be known. Under eager expansion selection chooses
where rollouts begin, so there they are few: `rollout` and `hard` then label only nodes that have some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.annotation.tree import Row, children_of, tree_values, trees_of

if TYPE_CHECKING:
    from stages.parameters.annotate import Annotate

LABEL_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("node", pa.int32()),
        ("parent", pa.int32()),
        ("depth", pa.int32()),
        ("visits", pa.int32()),
        ("n_rollouts", pa.int32()),
        ("q", pa.float64()),
        ("q_rollout", pa.float64()),
        ("stderr", pa.float64()),
        ("hard", pa.int8()),
        ("q_tree", pa.float64()),
        ("advantage", pa.float64()),
        ("best", pa.float64()),
        ("process", pa.float64()),
        ("steps_to_success", pa.int32()),
    ]
)
"""`advantage` is null for the root and below a parent without label; `steps_to_success` where no correct end is known below."""


def soft(row: Row) -> float:
    """Share of the policy's rollouts through a node that succeeded; 0 without rollouts."""
    return row["n_success"] / row["n_rollouts"] if row["n_rollouts"] else 0.0


def hard(row: Row) -> int:
    """1 if any rollout through the node succeeded."""
    return int(row["n_success"] > 0)


def ended(row: Row) -> bool:
    return bool(row["terminal"] or row["truncated"])


def standard_error(row: Row) -> float:
    """Of the soft label, with (c + 1) / (k + 2) as the share, so that few equal outcomes claim no certainty; 0 at an end."""
    if ended(row) or not row["n_rollouts"]:
        return 0.0
    share = (row["n_success"] + 1) / (row["n_rollouts"] + 2)
    return math.sqrt(share * (1 - share) / row["n_rollouts"])


def steps_to(tree: Sequence[Row], success: bool) -> list[int | None]:
    """Fewest steps from each node of one tree to a correct (wrong) end below it, 0 at such an end, None if none is known."""
    children = children_of(tree)
    steps: list[int | None] = [None] * len(tree)
    for row in reversed(tree):
        if ended(row):
            steps[row["node"]] = 0 if bool(hard(row)) == success else None
            continue
        below = [found + 1 for child in children[row["node"]] if (found := steps[child]) is not None]
        steps[row["node"]] = min(below, default=None)
    return steps


def process_values(tree: Sequence[Row]) -> list[float]:
    """ReST-MCTS* value of each node of one tree, in [0, 1]."""
    away = steps_to(tree, success=True)
    values = [0.0] * len(tree)
    counts: list[int | None] = [None] * len(tree)
    for row in tree:
        node, parent = row["node"], row["parent"]
        correct = away[node] is not None
        counts[node] = away[node] + 1 if correct else (counts[parent] if node else None)  # type: ignore[operator]
        if not node:
            continue
        m = counts[node]
        # Without a correct end anywhere above, the value stays at its lowest.
        values[node] = 0.0 if m is None else max(0.0, values[parent] + (1 if correct else -1) * (1 - values[parent]) / m)
    return values


def best_values(tree: Sequence[Row], gamma: float) -> list[float]:
    """QLASS's value of each node of one tree: r + gamma * the best child's. Children of which nothing is known, neither by a
    visit nor by an end below, have no say."""
    children = children_of(tree)
    values, known = [0.0] * len(tree), [bool(row["N"]) or ended(row) for row in tree]
    for row in reversed(tree):
        node = row["node"]
        below = [values[child] for child in children[node] if known[child]]
        known[node] = known[node] or bool(below)
        values[node] = row["reward"] + (gamma * max(below) if below else 0.0)
    return values


def first_error(tree: Sequence[Row], end: int) -> int | None:
    """The first node on the way to `end` below which no right end is known: OmegaPRM's first wrong step. None for a right end."""
    away, path = steps_to(tree, success=True), [end]
    while path[-1]:
        path.append(tree[path[-1]]["parent"])
    return next((node for node in path[::-1][1:] if away[node] is None), None)


def min_max(values: Sequence[float]) -> list[float]:
    """Scaled to [0, 1]; all 0 where they are equal."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def unscaled_q(tree: Sequence[Row], params: Annotate) -> list[float]:
    """The Q that `annotate.labels.q` names, of each node of one tree."""
    match params.labels.q:
        case "tree":
            return tree_values(tree, params)
        case "best":
            return best_values(tree, params.gamma)
        case "process":
            return process_values(tree)
        case "hard":
            return [float(hard(row)) for row in tree]
        case _:
            return [soft(row) for row in tree]


def node_q(tree: Sequence[Row], params: Annotate) -> list[float]:
    """`unscaled_q`, scaled as `annotate.labels.scale` says."""
    q = unscaled_q(tree, params)
    return min_max(q) if params.labels.scale == "min_max" else q


def weighed(row: Row, params: Annotate, min_visits: int) -> bool:
    """Whether a node's Q rests on something: enough visits and, where the policy's rollouts are what counts, any of these."""
    counts = params.labels.q in ("rollout", "hard") and not ended(row)
    return row["N"] >= min_visits and not (counts and not row["n_rollouts"])


def label_rows(rows: Sequence[Row], params: Annotate) -> list[dict[str, Any]]:
    """Rows of LABEL_SCHEMA for all nodes of all trees that have enough visits, by task and node."""
    labels = []
    for task_id, tree in trees_of(rows).items():
        q = node_q(tree, params)
        q_tree = tree_values(tree, params)
        best, process, away = best_values(tree, params.gamma), process_values(tree), steps_to(tree, success=True)
        labelled = [weighed(row, params, params.labels.min_visits) for row in tree]
        for row in tree:
            node, parent = row["node"], row["parent"]
            if not labelled[node]:
                continue
            labels.append(
                {
                    "task_id": task_id,
                    "node": node,
                    "parent": parent,
                    "depth": row["depth"],
                    "visits": row["N"],
                    "n_rollouts": row["n_rollouts"],
                    "q": q[node],
                    "q_rollout": soft(row),
                    "stderr": standard_error(row),
                    "hard": hard(row),
                    "q_tree": q_tree[node],
                    "advantage": q[node] - q[parent] if node and labelled[parent] else None,
                    "best": best[node],
                    "process": process[node],
                    "steps_to_success": away[node],
                }
            )
    return labels
