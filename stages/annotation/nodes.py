"""Stored search trees (rows of `node_schema`) and what is computed from the rows alone: children, paths, rewards, values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.annotation.backup import backed_up, mix_critic
from stages.annotation.derived import rollouts_only
from stages.records.episode import NODE_SCHEMA

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

Row = Mapping[str, Any]

EXTRA_COLUMNS = pa.schema([("W2", pa.float64()), ("model_value", pa.float64()), ("drawn", pa.bool_()), ("accepted", pa.bool_())])
"""In addition to NODE_SCHEMA, unless all nodes and values come from rollouts."""


OWNER = pa.field("owner", pa.list_(pa.int8()))
"""Per token of the action, who wrote it; null: the policy wrote all. Only of trees with tokens that it did not write."""


FORGETS = pa.field("forgets", pa.int16())
"""How many turns ago the observation was made that later turns do not see; null: they see all. Only of trees with some."""


def node_schema(params: Annotate, rows: Sequence[Row] = ()) -> pa.Schema:
    """Columns of nodes.parquet with these rows."""
    columns = NODE_SCHEMA if rollouts_only(params) else pa.schema([*NODE_SCHEMA, *EXTRA_COLUMNS])
    for field in (OWNER, FORGETS):
        columns = columns.append(field) if any(row.get(field.name) for row in rows) else columns
    return columns


def ended(row: Row) -> bool:
    """Whether the episode ended at a node, terminated or truncated."""
    return bool(row["terminal"] or row["truncated"])


def trees_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Node rows by task, tasks in order of name, nodes in order. Raises ValueError if a tree's nodes aren't 0, 1, 2, ..."""
    trees: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["task_id"], row["node"])):
        trees.setdefault(row["task_id"], []).append(row)
    for task, tree in trees.items():
        if [row["node"] for row in tree] != list(range(len(tree))):
            raise ValueError(f"nodes of task {task} are not numbered 0 to {len(tree) - 1} without gaps; run annotate again")
    return trees


def children_of(tree: Sequence[Row]) -> list[list[int]]:
    """Children of each node of one tree, in order of creation."""
    children: list[list[int]] = [[] for _ in tree]
    for row in tree[1:]:
        children[row["parent"]].append(row["node"])
    return children


def path_to(tree: Sequence[Row], node: int) -> list[int]:
    """Nodes of one tree from the root to `node`, both included."""
    path = [node]
    while path[-1]:
        path.append(tree[path[-1]]["parent"])
    return path[::-1]


def forgotten(tree: Sequence[Row], path: Sequence[int]) -> list[list[int]]:
    """`Episode.forgotten` of a path from the root: an end of the episode has no later turns to hide anything from."""
    rows = enumerate(tree[node] for node in path[1:])
    return [[turn - row["forgets"], turn] for turn, row in rows if row.get("forgets") and not ended(row)]


def first_rollouts(tree: Sequence[Row]) -> Sequence[Row]:
    """Where the policy's rollouts of one tree begin: the root or, under eager expansion, which starts them at a leaf's child, its
    children."""
    return tree[:1] if tree[0]["n_rollouts"] else [row for row in tree if row["parent"] == 0]


def totals_of(tree: Sequence[Row]) -> list[float]:
    """Sum of rewards from the root of one tree to each of its nodes."""
    totals = [0.0] * len(tree)
    for row in tree[1:]:
        totals[row["node"]] = totals[row["parent"]] + row["reward"]
    return totals


def expanded_row(row: Row, params: Annotate) -> bool:
    """`Tree.expanded` of a stored node."""
    if params.expansion.kind == "eager":
        return bool(row["drawn"])
    return not ended(row) and row["n_rollouts"] >= params.expand_k


def tree_values(tree: Sequence[Row], params: Annotate, critic: bool = True) -> list[float]:
    """Every node's value under the backup rule, bit for bit that of the live search. `critic`: mix it with the critic's ranks, if
    any, which order siblings and are no returns."""
    children, totals = children_of(tree), totals_of(tree)
    values = [0.0] * len(tree)
    for row in reversed(tree):  # a child is numbered after its parent
        node = row["node"]
        below = [(tree[child]["N"], values[child]) for child in children[node]]
        model_value = row["model_value"] if params.evaluation.kind == "value_model" and not ended(row) else None
        to_come = None if model_value is None else model_value - totals[node]
        values[node] = backed_up(params, row["reward"], row["N"], row["W"], below, expanded_row(row, params), to_come)
    if not critic or params.evaluation.critic == "none":
        return values
    combined = list(values)
    for siblings in filter(None, children):
        q = [values[child] for child in siblings]
        priors = [tree[child]["prior"] for child in siblings]
        model_values = [tree[child].get("model_value") for child in siblings]
        for child, value in zip(siblings, mix_critic(q, priors, model_values, params), strict=True):
            combined[child] = value
    return combined
