"""Preference pairs as tokens: the common history and what each side did. A pure function of the stored nodes and pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.annotation.labels import hard, soft, steps_to
from stages.annotation.nodes import Row, children_of, trees_of


@dataclass(frozen=True)
class Continuation:
    """Tokens after a history; `policy` marks those that the policy chose, the last of them among them."""

    token_ids: tuple[int, ...]
    policy: tuple[bool, ...]
    value: float
    """In [0, 1]: of a whole continuation 1 if it ends right, else 0; of an action alone the share of the policy's rollouts after
    it that did."""


@dataclass(frozen=True)
class Pair:
    task_id: str
    history: tuple[int, ...]
    win: Continuation
    lose: Continuation
    weight: float


def path_to(tree: Sequence[Row], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while path[-1]:
        path.append(tree[path[-1]]["parent"])
    return path[::-1]


def path_below(tree: Sequence[Row], start: int, away: Sequence[int | None] | None) -> list[int]:
    """Node `start` and, given `away` (`steps_to` of the tree), those down to the nearest such end."""
    path, children = [start], children_of(tree)
    while away is not None and away[path[-1]]:
        path.append(min(child for child in children[path[-1]] if away[child] == away[path[-1]] - 1))  # type: ignore[operator]
    return path


def history_of(tree: Sequence[Row], node: int) -> tuple[int, ...]:
    """Every token from the task's start to the policy's turn at `node`."""
    path = path_to(tree, node)
    return tuple(token for step in path for token in (*tree[step]["token_ids"], *tree[step]["context_ids"]))


def continuation(tree: Sequence[Row], start: int, away: Sequence[int | None] | None) -> Continuation:
    """The action of node `start` and, given `away` (`steps_to` of the tree), all actions down to the nearest such end."""
    path = path_below(tree, start, away)
    tokens: list[int] = []
    policy: list[bool] = []
    for place, node in enumerate(path):
        action, context = tree[node]["token_ids"], tree[node]["context_ids"] if place + 1 < len(path) else []
        tokens += [*action, *context]
        policy += [True] * len(action) + [False] * len(context)
    value = soft(tree[start]) if away is None else float(hard(tree[path[-1]]))
    return Continuation(tuple(tokens), tuple(policy), value)


def pair_tokens(rows: Sequence[Row], pairs: Sequence[Mapping[str, Any]], level: str) -> list[Pair]:
    """The pairs (rows of PAIR_SCHEMA) of trees (rows of NODE_SCHEMA), in order.

    level step: the two actions. trajectory: each with what followed it, the winner to its nearest right end, the loser to its
    nearest wrong one. Raises ValueError if a pair's tree is not among the nodes.
    """
    trees = trees_of(rows)
    away = {
        task: [steps_to(tree, success) if level == "trajectory" else None for success in (True, False)]
        for task, tree in trees.items()
    }
    found = []
    for pair in pairs:
        task = pair["task_id"]
        if task not in trees:
            raise ValueError(f"pairs.parquet names task {task}, which nodes.parquet has no tree of; run annotate again")
        tree, (right, wrong) = trees[task], away[task]
        win, lose = continuation(tree, pair["win"], right), continuation(tree, pair["lose"], wrong)
        found.append(Pair(task, history_of(tree, pair["parent"]), win, lose, pair["weight"]))
    return found
