"""A short summary of a search tree, and descriptions of its Q and q under the settings, for the tree viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.annotation.derived import highest_value, lowest_value
from stages.annotation.labels import hard, has_enough_visits, node_q
from stages.annotation.nodes import Row, children_of, ended, path_to, tree_values
from stages.reporting.figures.data import short
from stages.reporting.figures.trees import most_visited_path

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

ACTION_LENGTH, PATH_LENGTH = 60, 8
"""Characters of an action and actions of a path that are quoted."""
BACKUPS = {
    "mean": "mean return of the visits through an action",
    "max": "maximum over the child actions, or the mean of the visits while there are none",
    "discounted_max": "rewards from the action on, if the best of the tried actions follow",
    "children_mean": "mean over the child actions, weighted by visits",
}
LABELS = {
    "rollout": "mean return of the policy's rollouts after an action (their success rate where only success is rewarded)",
    "hard": "1 if any of the policy's rollouts through an action succeeded, else 0",
    "tree": "Q of the search, without the rewards before the action",
    "best": "best return found after an action",
    "process": "progress towards a success: up with every step towards one, down with every step away",
}


@dataclass(frozen=True)
class TreeData:
    """One tree with its values, labels and pairs."""

    nodes: Sequence[Row]
    children: list[list[int]]
    values: list[float]
    q: list[float | None]
    """`annotate.labels.q` before scaling, which pairs are made by; None where undefined."""
    labels: Mapping[int, Row]
    pairs: Sequence[Row]
    path: list[int]
    """The most visited path, from the root."""
    ends: dict[int, str]
    """Node -> "success", "failure" or "truncated", where the episode ended."""
    params: Annotate

    @classmethod
    def of(cls, nodes: Sequence[Row], labels: Sequence[Row], pairs: Sequence[Row], params: Annotate) -> TreeData:
        ends = {
            row["node"]: "success" if hard(row) else "truncated" if row["truncated"] else "failure" for row in nodes if ended(row)
        }
        path = [row["node"] for row in most_visited_path(nodes)]
        q = [
            value if has_enough_visits(row, params, 1) else None for row, value in zip(nodes, node_q(nodes, params), strict=True)
        ]
        by_node = {label["node"]: label for label in labels}
        return cls(nodes, children_of(nodes), tree_values(nodes, params), q, by_node, pairs, path, ends, params)


def scale(params: Annotate) -> str:
    """The meaning of the lowest and the highest value of a tree."""
    low, high = f"{lowest_value(params):g}".replace("-", "−"), f"{highest_value(params):g}"
    names = ("failure", "success") if params.returns == [0.0, 1.0] and params.gamma == 1.0 else ("worst", "best")
    return f"{low} = {names[0]}, {high} = {names[1]}"


def meanings(params: Annotate) -> dict[str, str]:
    """What `Q` and `q` of a node are, and their `scale`."""
    value = BACKUPS[params.backup]
    if params.evaluation.kind == "value_model":
        value += "; leaves are evaluated by the step-value model"
    elif params.evaluation.kind == "mixed":
        value += "; leaves are evaluated by rollouts and the step-value model"
    if params.evaluation.critic != "none":
        value += f"; mixed with the {'policy' if params.evaluation.critic == 'prior' else 'value model'}'s ranking of siblings"
    label = LABELS[params.labels.q]
    if params.labels.scale == "min_max":
        label += ", min-max scaled within the tree"
    return {"Q": value, "q": label, "scale": scale(params)}


def _quoted(row: Row) -> str:
    return f"“{short(row['action'], ACTION_LENGTH)}”"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _two(value: float) -> str:
    """Two digits, halves up, as the page's script rounds."""
    return f"{value + 1e-9:.2f}".replace("-", "−")


def _path(rows: Sequence[Row]) -> str:
    quoted = [_quoted(row) for row in rows]
    return " → ".join(quoted if len(quoted) <= PATH_LENGTH else [*quoted[: PATH_LENGTH - 1], "…", quoted[-1]])


def _size(tree: TreeData) -> str:
    kinds = list(tree.ends.values())
    ends = [f"{kinds.count(kind)} {kind}" for kind in ("success", "failure", "truncated") if kind in kinds]
    visits = _count(tree.nodes[0]["N"], "visit")
    return f"{visits}, {_count(len(tree.nodes), 'node')}; episode ends: {', '.join(ends) or 'none'}."


def _first_choice(tree: TreeData) -> str | None:
    """The first node on the most visited path with several visited children; None without a visited action."""
    nodes, path = tree.nodes, [number for number in tree.path[1:] if tree.nodes[number]["N"]]
    if not path:
        return None
    for place, number in enumerate(path):
        parent, row = nodes[nodes[number]["parent"]], nodes[number]
        tried = sum(nodes[child]["N"] > 0 for child in tree.children[parent["node"]])
        if tried > 1:
            where = f"after {_path([nodes[step] for step in path[:place]])}" if place else "at the start"
            return (
                f"First choice {where}: {_quoted(row)} has {row['N']} of {parent['N']} visits ({tried} actions tried), "
                f"Q {_two(tree.values[number])} vs. {_two(tree.values[parent['node']])} before it ({scale(tree.params)})."
            )
    return f"No choice: all visits take {_path([nodes[step] for step in path])}, Q {_two(tree.values[path[0]])}."


def _shortest_success(tree: TreeData) -> str:
    solved = [row for row in tree.nodes if tree.ends.get(row["node"]) == "success"]
    if not solved:
        return "No success found."
    nearest = min(solved, key=lambda row: (row["depth"], row["node"]))
    path = [tree.nodes[number] for number in path_to(tree.nodes, nearest["node"]) if number]
    return f"Shortest success: {_path(path)}." if path else "The start is already a success."


def _clearest_pair(tree: TreeData) -> str:
    if not tree.pairs:
        return "No preference pairs."
    best = min(tree.pairs, key=lambda pair: (-pair["margin"], pair["parent"], pair["win"], pair["lose"]))
    win, lose = tree.nodes[best["win"]], tree.nodes[best["lose"]]
    return (
        f"{_count(len(tree.pairs), 'preference pair')}; largest margin at action {win['depth']}: {_quoted(win)} over "
        f"{_quoted(lose)}, q differs by {_two(best['margin'])}."
    )


def summary(tree: TreeData) -> str:
    """How often the policy succeeds alone, the tree's size, the first choice, the shortest success, the clearest pair."""
    root = tree.nodes[0]
    alone = f"Policy alone: {root['n_success']} of {root['n_rollouts']} rollouts succeed." if root["n_rollouts"] else None
    return " ".join(filter(None, [alone, _size(tree), _first_choice(tree), _shortest_success(tree), _clearest_pair(tree)]))
