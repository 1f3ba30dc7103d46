"""What the step-value model learns from: histories along tree paths, each node's value read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.annotation.labels import ended, unscaled_q
from stages.annotation.tree import Row, children_of, trees_of
from stages.annotation.units import return_of
from stages.values.step_value import ValuePath

if TYPE_CHECKING:
    from stages.parameters.annotate import Annotate


def value_paths(rows: Sequence[Row], params: Annotate) -> list[ValuePath]:
    """Fewest paths that cover every node from which the policy acts (ended nodes need no prediction).

    A node is read at the last token of its context, where the policy's turn begins, on the first path that reaches it; its
    target is the success share of the policy's rollouts from there, its weight their number; or, by `annotate.labels.q`, another
    of the labels, in the units of an episode's return, with the visits for its weight. Nodes without weight are not learnt.
    """
    paths = []
    by_visits = params.labels.q in ("tree", "best", "process")
    for task_id, tree in trees_of(rows).items():
        children = children_of(tree)
        values = None if params.labels.q == "rollout" else unscaled_q(tree, params)
        if values and params.labels.q == "tree":  # the others are in no units of the tree's
            values = [return_of(params, value) for value in values]
        covered: set[int] = set()
        for row in tree:
            if ended(row) or any(not ended(tree[child]) for child in children[row["node"]]):
                continue
            token_ids: list[int] = []
            boundaries, successes, rollouts = [], [], []
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
                successes.append(float(at["n_success"]) if values is None else values[node] * count)
            if boundaries:
                paths.append(ValuePath(task_id, token_ids, boundaries, successes, rollouts))
    return paths


def _down_to(tree: Sequence[Row], node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(tree[path[-1]]["parent"])
    return path[::-1]


def mean_success(paths: Sequence[ValuePath]) -> float:
    """Share of rollouts that succeeded over all places."""
    return sum(sum(path.successes) for path in paths) / sum(sum(path.rollouts) for path in paths)
