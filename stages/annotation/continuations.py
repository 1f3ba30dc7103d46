"""Preference pairs as tokens: the common history and each side's continuation. A pure function of stored nodes and pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.annotation.labels import hard, steps_to, success_rate
from stages.annotation.nodes import Row, children_of, path_to, trees_of
from stages.records.episode import Owner


@dataclass(frozen=True)
class Continuation:
    """Tokens after a history; `policy` marks those that the policy wrote."""

    token_ids: tuple[int, ...]
    policy: tuple[bool, ...]
    value: float
    """In [0, 1]: 1 or 0 for a full continuation that succeeds or fails; for a single action its rollouts' success rate."""


@dataclass(frozen=True)
class Pair:
    task_id: str
    history: tuple[int, ...]
    win: Continuation
    lose: Continuation
    weight: float


def path_below(tree: Sequence[Row], start: int, distance: Sequence[int | None] | None) -> list[int]:
    """Node `start` and, given `distance` (`steps_to` of the tree), the nodes down to the nearest such end."""
    path, children = [start], children_of(tree)
    while distance is not None and (left := distance[path[-1]]):
        path.append(min(child for child in children[path[-1]] if distance[child] == left - 1))
    return path


def path_tokens(tree: Sequence[Row], path: Sequence[int]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokens of the nodes in `path` up to the last action, and which of them the policy wrote."""
    tokens: list[int] = []
    policy: list[bool] = []
    for place, node in enumerate(path):
        action, context = tree[node]["token_ids"], tree[node]["context_ids"] if place + 1 < len(path) else []
        tokens += [*action, *context]
        owners = tree[node].get("owner") or [Owner.POLICY] * len(action)
        policy += [owner == Owner.POLICY for owner in owners] + [False] * len(context)
    return tuple(tokens), tuple(policy)


def history_of(tree: Sequence[Row], node: int) -> tuple[int, ...]:
    """All tokens from the task's start up to the policy's turn at `node`."""
    path = path_to(tree, node)
    return tuple(token for step in path for token in (*tree[step]["token_ids"], *tree[step]["context_ids"]))


def continuation(tree: Sequence[Row], start: int, distance: Sequence[int | None] | None) -> Continuation:
    """The action of node `start` and, given `distance` (`steps_to` of the tree), all turns down to the nearest such end."""
    path = path_below(tree, start, distance)
    value = success_rate(tree[start]) if distance is None else float(hard(tree[path[-1]]))
    return Continuation(*path_tokens(tree, path), value)


def end_distances(tree: Sequence[Row], level: str) -> list[list[int | None] | None]:
    """Steps to the nearest successful and to the nearest failed end for level trajectory; None for level step."""
    return [steps_to(tree, success) if level == "trajectory" else None for success in (True, False)]


def pair_tokens(rows: Sequence[Row], pairs: Sequence[Mapping[str, Any]], level: str) -> list[Pair]:
    """The pairs (rows of PAIR_SCHEMA) of trees (rows of NODE_SCHEMA), in order, without those of which a side has no token of the
    policy: there would be nothing to learn.

    level step: the two actions. trajectory: each with its continuation, the winner's to its nearest successful end, the loser's
    to its nearest failed one. Raises ValueError if a pair's tree is not among the nodes.
    """
    trees = trees_of(rows)
    distances = {task: end_distances(tree, level) for task, tree in trees.items()}
    found = []
    for pair in pairs:
        task = pair["task_id"]
        if task not in trees:
            raise ValueError(f"pairs.parquet lists task {task}, which has no tree in nodes.parquet; run annotate again")
        tree = trees[task]
        win, lose = (continuation(tree, pair[side], to) for side, to in zip(("win", "lose"), distances[task], strict=True))
        if any(win.policy) and any(lose.policy):
            found.append(Pair(task, history_of(tree, pair["parent"]), win, lose, pair["weight"]))
    return found
