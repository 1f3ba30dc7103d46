"""Step labels: pure functions of the stored nodes (NODE_SCHEMA), so they can be made again without searching again.

q of a node is that of the action that led there, the reward still to come from the history before it: q = r + gamma V, r being
the action's own reward and V the reward still to come after it, 0 at an end. Rewards that were paid before have no part in
either. With c of k policy rollouts through the node that succeeded:
  q_rollout  V is the mean over these rollouts of the discounted rewards that came after the node: Q of the policy. Where success
             alone pays, at the end, and gamma is 1, it is c / k, the soft Monte-Carlo label of Math-Shepherd (2312.08935) and
             OmegaPRM (2406.06592)
  hard       1 if c > 0, else 0. No return: q and V are both this
  q_tree     the tree's value under the backup rule without what was paid before: between Q of the policy and Q*. In the tree's
             units (`annotate.reward_range`)
  best       QLASS (2502.02584), after the search: r + gamma * the best child's; r where nothing is known below. The best that was
             seen, not what the policy can expect
  process    ReST-MCTS* (2406.03816): v = max(0, v_parent + sign (1 - v_parent) / m), v of the root 0; sign is +1 if a correct end
             is known below, else -1; m = fewest steps to a correct end counting this one (a wrong branch takes the m of its
             nearest correct ancestor). No return: q and V are both this
  q          one of these, by `annotate.labels.q`; rollouts are pooled where the search chose how many there are
             (stages/annotation/pooling.py). Scaled to [0, 1] within the tree under `labels.scale: min_max`;
             advantage = q(node) - V(parent) = r + gamma V(node) - V(parent)
Nodes with fewer than `min_visits` visits get no label. A visit to a node that is not expanded is a policy rollout, so the gate
bounds k from below as well (by expand_k at most); an end needs no rollouts to be known. Under eager expansion selection chooses
where rollouts begin, so there they are few: `rollout` and `hard` then label only nodes that have some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.annotation.nodes import Row, children_of, ended, totals_of, tree_values, trees_of
from stages.annotation.pooling import pooled_values
from stages.annotation.units import pools_rollouts, unit

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
"""`advantage` is null for the root and below a parent without label; `steps_to_success` where no correct end is known below."""


def soft(row: Row) -> float:
    """Share of the policy's rollouts through a node that succeeded; 0 without rollouts."""
    return row["n_success"] / row["n_rollouts"] if row["n_rollouts"] else 0.0


def hard(row: Row) -> int:
    """1 if any rollout through the node succeeded."""
    return int(row["n_success"] > 0)


def standard_error(row: Row, returns: Sequence[float] = (0.0, 1.0)) -> float:
    """Of the mean over the policy's rollouts through a node, with (c + 1) / (k + 2) as the share of the way from the worst to the
    best of `returns`, so that few equal outcomes claim no certainty; 0 at an end. Where outcomes lie between the two it is an
    upper bound: nothing in [a, b] of mean m varies by more than (m - a)(b - m)."""
    if ended(row) or not row["n_rollouts"]:
        return 0.0
    count, (worst, best) = row["n_rollouts"], returns
    share = ((row["R"] - count * worst) / (best - worst) + 1) / (count + 2)
    return (best - worst) * math.sqrt(max(0.0, share * (1 - share)) / count)


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


def best_known(tree: Sequence[Row]) -> list[bool]:
    """Of which nodes of one tree something is known, by a visit or by an end below."""
    known = [bool(row["N"]) or ended(row) for row in tree]
    for row in reversed(tree[1:]):
        known[row["parent"]] |= known[row["node"]]
    return known


def best_values(tree: Sequence[Row], gamma: float) -> list[float]:
    """QLASS's value of each node of one tree: r + gamma * the best child's. Children of which nothing is known have no say."""
    children, known = children_of(tree), best_known(tree)
    values = [0.0] * len(tree)
    for row in reversed(tree):
        below = [values[child] for child in children[row["node"]] if known[child]]
        values[row["node"]] = row["reward"] + (gamma * max(below) if below else 0.0)
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


def rollout_values(tree: Sequence[Row]) -> list[float]:
    """V of each node of one tree by the policy's rollouts: the mean of what came after it; 0 without rollouts."""
    return [row["R"] / row["n_rollouts"] if row["n_rollouts"] else 0.0 for row in tree]


def tree_values_to_go(tree: Sequence[Row], params: Annotate) -> list[float]:
    """V of each node of one tree by the tree's value, in the tree's units."""
    values = tree_values(tree, params)
    if params.backup == "discounted_max":
        return [(value - row["reward"]) / params.gamma if params.gamma else 0.0 for row, value in zip(tree, values, strict=True)]
    return [value - unit(params) * total for value, total in zip(values, totals_of(tree), strict=True)]


def values_of(tree: Sequence[Row], params: Annotate) -> list[float]:
    """V that `annotate.labels.q` names, of each node of one tree: the reward still to come after it, 0 at an end; under `hard`
    and `process` what these say of it."""
    match params.labels.q:
        case "tree":
            return tree_values_to_go(tree, params)
        case "best":
            best, children = best_values(tree, params.gamma), children_of(tree)
            known = best_known(tree)
            return [max((best[child] for child in below if known[child]), default=0.0) for below in children]
        case "process":
            return process_values(tree)
        case "hard":
            return [float(hard(row)) for row in tree]
        case _:
            return rollout_values(tree)


def q_of(tree: Sequence[Row], values: Sequence[float], params: Annotate) -> list[float]:
    """q of each node of one tree, given V of each by the same definition."""
    if params.labels.q in ("hard", "process"):
        return list(values)
    if params.labels.q == "tree" and params.backup != "discounted_max":
        return tree_q(tree, params)
    return [row["reward"] + params.gamma * value for row, value in zip(tree, values, strict=True)]


def tree_q(tree: Sequence[Row], params: Annotate) -> list[float]:
    """The tree's value of each action of one tree, without what was paid before it; in the tree's units."""
    values = tree_values(tree, params)
    if params.backup == "discounted_max":
        return values
    totals = totals_of(tree)
    paid = (totals[row["parent"]] if row["node"] else 0.0 for row in tree)
    return [value - unit(params) * before for value, before in zip(values, paid, strict=True)]


def node_q(tree: Sequence[Row], params: Annotate) -> list[float]:
    """q of each node of one tree as it was counted, without pooling: what pairs and Q-models go by. Scaled as
    `annotate.labels.scale` says."""
    q = q_of(tree, values_of(tree, params), params)
    return min_max(q) if params.labels.scale == "min_max" else q


def weighed(row: Row, params: Annotate, min_visits: int) -> bool:
    """Whether a node's Q rests on something: enough visits and, where the policy's rollouts are what counts, any of these."""
    counts = params.labels.q in ("rollout", "hard") and not ended(row)
    return row["N"] >= min_visits and not (counts and not row["n_rollouts"])


def _scaled(q: list[float], values: list[float], params: Annotate) -> tuple[list[float], list[float]]:
    """q and V as `annotate.labels.scale` says, both by the range of q."""
    low, high = min(q), max(q)
    if params.labels.scale == "none":
        return q, values
    width = high - low
    return min_max(q), [(value - low) / width if width > 0 else 0.0 for value in values]


def label_rows(rows: Sequence[Row], params: Annotate) -> list[dict[str, Any]]:
    """Rows of LABEL_SCHEMA for all nodes of all trees that have enough visits, by task and node."""
    trees, labels = trees_of(rows), []
    pooled = pooled_values(trees, params) if pools_rollouts(params) else {}
    for task_id, tree in trees.items():
        values = pooled.get(task_id) or values_of(tree, params)
        q, values = _scaled(q_of(tree, values, params), values, params)
        labelled = [weighed(row, params, params.labels.min_visits) for row in tree]
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
