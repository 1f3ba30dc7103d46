"""Step labels: pure functions of the stored nodes (NODE_SCHEMA), so changing a label needs no new search.

A node's q is the Q of the action that led to it, q = r + gamma V: r is the action's reward, V the expected return after it (0 at
an end). Rewards before the action are part of neither. With c successes in k policy rollouts through the node:
  q_rollout  V is the mean discounted return of these rollouts from the node on: Q of the policy. With a reward for success only
             and gamma 1 it is c / k, the soft Monte-Carlo label of Math-Shepherd (2312.08935) and OmegaPRM (2406.06592)
  hard       1 if c > 0, else 0; not a return, q and V are the same
  q_tree     the tree's value under the backup rule without earlier rewards: between Q of the policy and Q*, in the tree's units
             (`annotate.reward_range`) and without a critic's ranks, which order siblings and are no returns
  best       QLASS (2502.02584), after the search: r + gamma * the best child's value, r if nothing is known below: the best
             return seen, not the policy's expected return
  process    ReST-MCTS* (2406.03816): v = max(0, v_parent + sign (1 - v_parent) / m), v of the root 0; sign is +1 if a correct end
             is known below, else -1; m = fewest steps to a correct end including this one (a wrong branch uses the m of its
             nearest correct ancestor); not a return, q and V are the same
  q          one of these, by `annotate.labels.q`; rollouts are pooled where the search decided how many there are
             (stages/annotation/pooling.py). Scaled to [0, 1] within the tree under `labels.scale: min_max`;
             advantage = q(node) - V(parent) = r + gamma V(node) - V(parent)
Nodes with fewer than `min_visits` visits get no label. A visit to an unexpanded node is a policy rollout, so `min_visits` is also
a lower bound on k (up to expand_k); an end needs no rollouts. Under eager expansion, selection decides where rollouts start:
`rollout` and `hard` then label only nodes with rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.annotation.derived import pools_rollouts, reward_scale
from stages.annotation.nodes import Row, children_of, ended, path_to, totals_of, tree_values, trees_of
from stages.annotation.pooling import pooled_values

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

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
"""`advantage` is null for the root and below an unlabelled parent; `steps_to_success` if no correct end is known below."""


def success_rate(row: Row) -> float:
    """Success rate of the policy's rollouts through a node; 0 without rollouts."""
    return row["n_success"] / row["n_rollouts"] if row["n_rollouts"] else 0.0


def hard(row: Row) -> int:
    """1 if any rollout through the node succeeded."""
    return int(row["n_success"] > 0)


def standard_error(row: Row, returns: Sequence[float] = (0.0, 1.0)) -> float:
    """Standard error of the mean return of the policy's rollouts through a node; 0 at an end.

    Uses the success rate (c + 1) / (k + 2), so that a few equal outcomes do not give 0. For returns between the worst and best of
    `returns` it is an upper bound: a variable in [a, b] of mean m has a variance of at most (m - a)(b - m)."""
    if ended(row) or not row["n_rollouts"]:
        return 0.0
    count, (worst, best) = row["n_rollouts"], returns
    share = ((row["R"] - count * worst) / (best - worst) + 1) / (count + 2)
    return (best - worst) * math.sqrt(max(0.0, share * (1 - share)) / count)


def steps_to(tree: Sequence[Row], success: bool) -> list[int | None]:
    """Fewest steps from each node of one tree to a successful (failed) end below it, 0 at such an end, None if none is known."""
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
    distance = steps_to(tree, success=True)
    values = [0.0] * len(tree)
    counts: list[int | None] = [None] * len(tree)
    for row in tree:
        node, parent = row["node"], row["parent"]
        left = distance[node]
        m = counts[node] = left + 1 if left is not None else (counts[parent] if node else None)
        # Without a correct end below any ancestor, the value stays 0.
        if node and m is not None:
            values[node] = max(0.0, values[parent] + (-1 if left is None else 1) * (1 - values[parent]) / m)
    return values


def has_outcome(tree: Sequence[Row]) -> list[bool]:
    """Which nodes of one tree have a visit, or an end below."""
    known = [bool(row["N"]) or ended(row) for row in tree]
    for row in reversed(tree[1:]):
        known[row["parent"]] |= known[row["node"]]
    return known


def best_values(tree: Sequence[Row], gamma: float) -> list[float]:
    """QLASS's value of each node of one tree: r + gamma * the best child's, among the children with an outcome."""
    children, known = children_of(tree), has_outcome(tree)
    values = [0.0] * len(tree)
    for row in reversed(tree):
        below = [values[child] for child in children[row["node"]] if known[child]]
        values[row["node"]] = row["reward"] + (gamma * max(below) if below else 0.0)
    return values


def first_error(tree: Sequence[Row], end: int) -> int | None:
    """The first node on the path to `end` with no successful end below: OmegaPRM's first wrong step; None for a success."""
    distance = steps_to(tree, success=True)
    return next((node for node in path_to(tree, end)[1:] if distance[node] is None), None)


def min_max(values: Sequence[float], low: float, high: float) -> list[float]:
    """Values with [`low`, `high`] scaled to [0, 1]; all 0 if `low` is `high`."""
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def rollout_values(tree: Sequence[Row]) -> list[float]:
    """V of each node of one tree: the mean return of the policy's rollouts from there on; 0 without rollouts."""
    return [row["R"] / row["n_rollouts"] if row["n_rollouts"] else 0.0 for row in tree]


def tree_values_to_go(tree: Sequence[Row], params: Annotate) -> list[float]:
    """V of each node of one tree from the tree's backed-up values, in the tree's units."""
    values = tree_values(tree, params, critic=False)
    if params.backup == "discounted_max":
        return [(value - row["reward"]) / params.gamma if params.gamma else 0.0 for row, value in zip(tree, values, strict=True)]
    return [value - reward_scale(params) * total for value, total in zip(values, totals_of(tree), strict=True)]


def node_values(tree: Sequence[Row], params: Annotate) -> list[float]:
    """V of each node as `annotate.labels.q` defines it: the expected return after it, or its hard or process value."""
    match params.labels.q:
        case "tree":
            return tree_values_to_go(tree, params)
        case "best":
            best, children = best_values(tree, params.gamma), children_of(tree)
            known = has_outcome(tree)
            return [max((best[child] for child in below if known[child]), default=0.0) for below in children]
        case "process":
            return process_values(tree)
        case "hard":
            return [float(hard(row)) for row in tree]
        case _:
            return rollout_values(tree)


def action_values(tree: Sequence[Row], values: Sequence[float], params: Annotate, critic: bool = False) -> list[float]:
    """q of each node of one tree, given each node's V under the same definition. `critic`: as in `tree_values`."""
    if params.labels.q in ("hard", "process"):
        return list(values)
    if params.labels.q == "tree":
        return tree_q(tree, params, critic)
    return [row["reward"] + params.gamma * value for row, value in zip(tree, values, strict=True)]


def tree_q(tree: Sequence[Row], params: Annotate, critic: bool = False) -> list[float]:
    """The tree's value of each action of one tree, without the rewards before it; in the tree's units. `critic`: as in
    `tree_values`."""
    values = tree_values(tree, params, critic)
    if params.backup == "discounted_max":
        return values
    totals = totals_of(tree)
    earlier = (totals[row["parent"]] if row["node"] else 0.0 for row in tree)
    return [value - reward_scale(params) * before for value, before in zip(values, earlier, strict=True)]


def node_q(tree: Sequence[Row], params: Annotate) -> list[float]:
    """q of each node of one tree to rank siblings by, for pairs and Q-models: not pooled, with the critic's ranks if the search
    has a critic, scaled by `annotate.labels.scale`."""
    q = action_values(tree, node_values(tree, params), params, critic=True)
    return min_max(q, *_measured_range(tree, q, params)) if params.labels.scale == "min_max" else q


def has_enough_visits(row: Row, params: Annotate, min_visits: int) -> bool:
    """Whether a node has enough visits for its Q and, if q is a statistic of rollouts, at least one rollout."""
    needs_rollouts = params.labels.q in ("rollout", "hard") and not ended(row)
    return row["N"] >= min_visits and not (needs_rollouts and not row["n_rollouts"])


def _measured_range(tree: Sequence[Row], q: Sequence[float], params: Annotate) -> tuple[float, float]:
    """Smallest and largest q of one tree among the nodes with an outcome that `annotate.labels.q` is computed from; the q of
    other nodes estimates nothing."""
    match params.labels.q:
        case "rollout" | "hard":
            known = [bool(row["n_rollouts"]) or ended(row) for row in tree]
        case "tree":
            known = [row["N"] > 0 for row in tree]
        case _:
            known = has_outcome(tree)
    found = [value for value, measured in zip(q, known, strict=True) if measured]
    return min(found, default=0.0), max(found, default=0.0)


def label_rows(rows: Sequence[Row], params: Annotate) -> list[dict[str, Any]]:
    """Rows of LABEL_SCHEMA for all nodes of all trees with enough visits, by task and node."""
    trees, labels = trees_of(rows), []
    pooled = pooled_values(trees, params) if pools_rollouts(params) else {}
    for task_id, tree in trees.items():
        values = pooled.get(task_id) or node_values(tree, params)
        q = action_values(tree, values, params)
        if params.labels.scale == "min_max":
            low, high = _measured_range(tree, q, params)
            q, values = min_max(q, low, high), min_max(values, low, high)
        labelled = [has_enough_visits(row, params, params.labels.min_visits) for row in tree]
        columns = {
            "q_rollout": [row["reward"] + params.gamma * mean for row, mean in zip(tree, rollout_values(tree), strict=True)],
            "hard": [hard(row) for row in tree],
            "q_tree": tree_q(tree, params),
            "best": best_values(tree, params.gamma),
            "process": process_values(tree),
            "steps_to_success": steps_to(tree, success=True),
        }
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
                    "stderr": params.gamma * standard_error(row, params.returns),
                    "advantage": q[node] - values[parent] if node and labelled[parent] else None,
                    **{name: column[node] for name, column in columns.items()},
                }
            )
    return labels
