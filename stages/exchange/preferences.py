"""Preference pairs of search trees as conversations (prompt, chosen, rejected), the format of TRL's preference trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.annotation.continuations import continuation, end_distances, path_below
from stages.annotation.nodes import Row, path_to, trees_of
from stages.records.messages import Messages
from stages.records.task import Task, opening


def turns_of(tree: Sequence[Row], path: Sequence[int]) -> Messages:
    """The nodes' actions in order, each followed by its observation."""
    roles = (("assistant", "action"), ("user", "observation"))
    return [{"role": role, "content": tree[node][column]} for node in path for role, column in roles]


def preference_rows(
    nodes: Sequence[Row], pairs: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task], level: str
) -> list[dict[str, Any]]:
    """A row for each of `pairs` (rows of PAIR_SCHEMA), in order; `nodes`: rows of NODE_SCHEMA; `tasks`: by id, for the prompts.

    level step: the two actions; trajectory: each with its continuation, as for `rl.preference.level`. Raises ValueError for a
    pair whose task is not in `tasks` or has no tree.
    """
    trees = trees_of(nodes)
    distances = {name: end_distances(tree, level) for name, tree in trees.items()}
    rows = []
    for pair in pairs:
        name = pair["task_id"]
        if name not in tasks or name not in trees:
            raise ValueError(f"pairs.parquet lists task {name}, which has no {'tree' if name in tasks else 'curated task'}")
        tree, task = trees[name], tasks[name]
        start = {"role": "user", "content": opening(task.prompt, tree[0]["observation"])}
        sides = [
            (turns_of(tree, path_below(tree, pair[side], to))[:-1], continuation(tree, pair[side], to).value)
            for side, to in zip(("win", "lose"), distances[name], strict=True)
        ]
        rows.append(
            {
                "prompt": [start, *turns_of(tree, path_to(tree, pair["parent"])[1:])],
                "chosen": sides[0][0],
                "rejected": sides[1][0],
                "chosen_value": sides[0][1],
                "rejected_value": sides[1][1],
                "weight": pair["weight"],
                "margin": pair["margin"],
                "domain": task.domain,
                "task_id": name,
            }
        )
    return rows
