"""What the step-value model learns from: histories along tree paths, each node's value read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.annotation.labels import values_of
from stages.annotation.nodes import Row, children_of, ended, totals_of, tree_values, trees_of
from stages.annotation.units import return_of
from stages.values.step_value import ValuePath

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate


def value_paths(rows: Sequence[Row], params: Annotate) -> list[ValuePath]:
    """Fewest paths that cover every node from which the policy acts (ended nodes need no prediction).

    A node is read at the last token of its context, where the policy's turn begins, on the first path that reaches it. Its target
    is V, the reward still to come from there (stages/annotation/labels.py), in the units of the environment's rewards: by default
    the mean over the policy's rollouts, its weight their number; or by another definition that `annotate.labels.q` names, with
    the visits for its weight (but for hard, which is about rollouts). Nodes without weight are not learnt.

    Rollouts are not pooled here: summed over all nodes, with each rollout counting once, what they bring is unbiased as it is.
    """
    paths = []
    by_visits = params.labels.q in ("tree", "best", "process")
    for task_id, tree in trees_of(rows).items():
        children = children_of(tree)
        values = _targets(tree, params)
        covered: set[int] = set()
        for row in tree:
            if ended(row) or any(not ended(tree[child]) for child in children[row["node"]]):
                continue
            token_ids: list[int] = []
            boundaries, returns, rollouts = [], [], []
            for node in _down_to(tree, row["node"]):
                at = tree[node]
                token_ids += [*at["token_ids"], *at["context_ids"]]
                if node in covered:
                    continue
                covered.add(node)
                count = at["N"] if by_visits else at["n_rollouts"]
                if not count:
                    continue
                boundaries.append(len(token_ids) - 1)
                rollouts.append(float(count))
                returns.append(at["R"] if params.labels.q == "rollout" else values[node] * count)
            if boundaries:
                paths.append(ValuePath(task_id, token_ids, boundaries, returns, rollouts))
    return paths


def _down_to(tree: Sequence[Row], node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(tree[path[-1]]["parent"])
    return path[::-1]


def _targets(tree: Sequence[Row], params: Annotate) -> list[float]:
    """V of each node of one tree, in the units of the environment's rewards."""
    if params.labels.q != "tree" or params.backup == "discounted_max":
        return values_of(tree, params)
    return [return_of(params, value) - total for value, total in zip(tree_values(tree, params), totals_of(tree), strict=True)]


def mean_value(paths: Sequence[ValuePath]) -> float:
    """Mean of the targets over all places, by weight."""
    return sum(sum(path.returns) for path in paths) / sum(sum(path.rollouts) for path in paths)
