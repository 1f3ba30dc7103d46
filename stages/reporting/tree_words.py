"""What a search tree and the numbers at its nodes say, in words for readers who did not choose the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.annotation.labels import hard, has_enough_visits, node_q
from stages.annotation.nodes import Row, children_of, ended, tree_values
from stages.annotation.units import highest_value, lowest_value
from stages.reporting.figures.data import short
from stages.reporting.figures.trees import most_visited_path

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

LETTERS = 60
"""Of an action within a sentence."""
STEPS = 8
"""Actions of a way that are named."""
BACKUPS = {
    "mean": "what the visits through an action brought, on average",
    "max": "what the best of the actions after it brought; the average of its visits until these are drawn",
    "discounted_max": "the rewards from an action on, if the best of those tried is taken from there",
    "children_mean": "the average of the actions after it, by visits",
}
LABELS = {
    "rollout": "what the policy's own rollouts brought from an action on, on average: the share that succeed, where only success "
    "pays",
    "hard": "1 if any of the policy's own rollouts through an action succeeded, else 0",
    "tree": "Q of the search itself, without what was paid before",
    "best": "the best return that was found from an action on",
    "process": "how near a success is: up with every step towards one, down with every step off its way",
}


@dataclass(frozen=True)
class Known:
    """One tree with all that is known of it."""

    tree: Sequence[Row]
    children: list[list[int]]
    values: list[float]
    """The tree's own."""
    q: list[float | None]
    """What `annotate.labels.q` says, as it was counted, which pairs go by; None where it says nothing."""
    labels: Mapping[int, Row]
    pairs: Sequence[Row]
    path: list[int]
    """The most visited way, the root first."""
    ends: dict[int, str]
    """Node -> how the episode ended there."""
    params: Annotate

    @classmethod
    def of(cls, tree: Sequence[Row], labels: Sequence[Row], pairs: Sequence[Row], params: Annotate) -> Known:
        ends = {
            row["node"]: "success" if hard(row) else "truncated" if row["truncated"] else "failure" for row in tree if ended(row)
        }
        path = [row["node"] for row in most_visited_path(tree)]
        known = {label["node"]: label for label in labels}
        q = [value if has_enough_visits(row, params, 1) else None for row, value in zip(tree, node_q(tree, params), strict=True)]
        return cls(tree, children_of(tree), tree_values(tree, params), q, known, pairs, path, ends, params)


def scale(params: Annotate) -> str:
    """What the lowest and the highest value of a tree stand for."""
    low, high = f"{lowest_value(params):g}".replace("-", "−"), f"{highest_value(params):g}"
    if params.returns == [0.0, 1.0] and params.gamma == 1.0:
        return f"{low} fails, {high} solves"
    return f"{low} is the worst, {high} the best"


def meanings(params: Annotate) -> dict[str, str]:
    """What `Q` and `q` of a node are, and the ends of their `scale`."""
    value = BACKUPS[params.backup]
    if params.evaluation.kind == "value_model":
        value += "; a visit brings what the step-value model says of where it stops"
    elif params.evaluation.kind == "mixed":
        value += "; the step-value model's word counts beside the rollout's"
    if params.evaluation.critic != "none":
        judge = "policy's" if params.evaluation.critic == "prior" else "value model's"
        value += f"; mixed with the {judge} ranking of what was tried"
    label = LABELS[params.labels.q]
    if params.labels.scale == "min_max":
        label += ", stretched to 0 … 1 within the tree"
    return {"Q": value, "q": label, "scale": scale(params)}


def _quoted(row: Row) -> str:
    return f"“{short(row['action'], LETTERS)}”"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _two(value: float) -> str:
    """Two digits, halves up, as the page's script rounds."""
    return f"{value + 1e-9:.2f}".replace("-", "−")


def _way(rows: Sequence[Row]) -> str:
    named = [_quoted(row) for row in rows]
    return " → ".join(named if len(named) <= STEPS else [*named[: STEPS - 1], "…", named[-1]])


def _ends(known: Known) -> str:
    kinds = list(known.ends.values())
    found = f"{_count(known.tree[0]['N'], 'visit')} made {_count(len(known.tree), 'node')}"
    names = {
        "success": ("solves the task", "solve the task"),
        "failure": ("fails", "fail"),
        "truncated": ("is cut off", "are cut off"),
    }
    parts = [f"{kinds.count(kind)} {name[kinds.count(kind) > 1]}" for kind, name in names.items() if kind in kinds]
    return found + (f"; of the ends, {', '.join(parts)}." if parts else ", and no end.")


def _divide(known: Known) -> str | None:
    """Where the most visited way leaves others that were visited, and what it is worth there; None without any visited action."""
    tree, way = known.tree, [number for number in known.path[1:] if known.tree[number]["N"]]
    if not way:
        return None
    for place, number in enumerate(way):
        before, row = tree[tree[number]["parent"]], tree[number]
        tried = sum(tree[child]["N"] > 0 for child in known.children[before["node"]])
        if tried < 2:
            continue
        said = f"All visits begin with {_way([tree[step] for step in way[:place]])}; there" if place else "At the start"
        return (
            f"{said}, {tried} actions were tried: most visits ({row['N']}) took {_quoted(row)}, worth "
            f"{_two(known.values[number])} ({scale(known.params)}), against {_two(known.values[before['node']])} before it."
        )
    return (
        f"All visits take one way, {_way([tree[step] for step in way])}: worth {_two(known.values[way[0]])} "
        f"({scale(known.params)})."
    )


def _success(known: Known) -> str:
    """The shortest way to a success, of equals the first that was found."""
    solved = [row for row in known.tree if known.ends.get(row["node"]) == "success"]
    if not solved:
        return "No success was found."
    row = min(solved, key=lambda row: (row["depth"], row["node"]))
    way = [row]
    while way[0]["node"]:
        way.insert(0, known.tree[way[0]["parent"]])
    return f"Nearest success: {_way(way[1:])}." if way[1:] else "The start is a success already."


def _pairs(known: Known) -> str:
    if not known.pairs:
        return "No two actions pass what annotate.pairs asks of a pair."
    best = min(known.pairs, key=lambda pair: (-pair["margin"], pair["parent"], pair["win"], pair["lose"]))
    count, win, lose = _count(len(known.pairs), "pair"), known.tree[best["win"]], known.tree[best["lose"]]
    clearest = ", the clearest" if len(known.pairs) > 1 else ""
    return (
        f"It gives {count} of actions to learn from{clearest} at action {win['depth']}: {_quoted(win)} rather than "
        f"{_quoted(lose)}, {_two(best['margin'])} apart in q."
    )


def story(known: Known) -> str:
    """What a tree shows, in plain sentences: how often the policy succeeds, where ways part and what the search preferred there,
    how the task is solved, the clearest pair."""
    root = known.tree[0]
    said = [_ends(known), _divide(known), _success(known), _pairs(known)]
    if root["n_rollouts"]:
        alone = f"Left to itself, the policy succeeds in {root['n_success']} of {root['n_rollouts']} rollouts from the start."
        said.insert(0, alone)
    return " ".join(filter(None, said))
