"""Training data of the step-value model: histories along tree paths, each node's value read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.annotation.derived import unscaled_return
from stages.annotation.labels import node_values
from stages.annotation.nodes import Row, children_of, ended, path_to, totals_of, tree_values, trees_of
from stages.values.step_value import ValuePath

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate


def value_paths(rows: Sequence[Row], params: Annotate) -> list[ValuePath]:
    """The fewest paths that cover every node where the policy acts (ended nodes need no prediction).

    A node is read at the last token of its context, right before the policy's turn, on the first path that reaches it. Its target
    is V as `annotate.labels.q` defines it (stages/annotation/labels.py), in units of the environment's rewards, weighted by the
    number of rollouts (rollout, hard) or visits (tree, best, process). Nodes of weight 0 are left out.

    Rollouts are not pooled here: summed over all nodes with equal weight per rollout, their plain means are unbiased.
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
            for node in path_to(tree, row["node"]):
                at = tree[node]
                token_ids += [*at["token_ids"], *at["context_ids"]]
                count = at["N"] if by_visits else at["n_rollouts"]
                if node not in covered and count:
                    boundaries.append(len(token_ids) - 1)
                    rollouts.append(float(count))
                    returns.append(at["R"] if params.labels.q == "rollout" else values[node] * count)
                covered.add(node)
            if boundaries:
                paths.append(ValuePath(task_id, token_ids, boundaries, returns, rollouts))
    return paths


def _targets(tree: Sequence[Row], params: Annotate) -> list[float]:
    """V of each node of one tree, in units of the environment's rewards."""
    if params.labels.q != "tree" or params.backup == "discounted_max":
        return node_values(tree, params)
    values = tree_values(tree, params, critic=False)
    return [unscaled_return(params, value) - total for value, total in zip(values, totals_of(tree), strict=True)]


def mean_value(paths: Sequence[ValuePath]) -> float:
    """Weighted mean of all targets."""
    return sum(sum(path.returns) for path in paths) / sum(sum(path.rollouts) for path in paths)
