"""The tree viewer's data: which search trees are shown, a compact form of them, and what each has to tell in a few sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.annotation.labels import ended, hard, node_q, weighed
from stages.annotation.selection import softmax
from stages.annotation.tree import Row, children_of, tree_values, trees_of
from stages.reporting.figures.trees import most_visited_path, telling_tree
from stages.seeding import permutation

if TYPE_CHECKING:
    from stages.parameters.annotate import Annotate

BYTES = 600_000
"""Limit of the viewer's data on the page, shared by the domains; what does not fit is left out and the page says so."""
ACTION, OBSERVATION = 160, 700
"""Letters of an action and of an answer that are shown."""


def short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def choose(nodes: Sequence[Row], pairs: Sequence[Row], count: int, *key: object) -> list[tuple[str, str]]:
    """`count` tasks with trees, each with why it was picked: the one in the balance, the one with most pairs (of equals the
    smaller tree, then the first), then at random by `key`."""
    trees = trees_of(nodes)
    if not trees or not count:
        return []
    paired: dict[str, int] = {}
    for pair in pairs:
        paired[pair["task_id"]] = paired.get(pair["task_id"], 0) + 1
    ranked = [("in the balance", telling_tree(nodes)[0]["task_id"])]
    most = min((task for task in paired if task in trees), key=lambda task: (-paired[task], len(trees[task]), task), default=None)
    if most is not None:
        ranked.append(("most pairs", most))
    ranked += [("at random", task) for task in permutation(sorted(trees), *key)]
    chosen: dict[str, str] = {}
    for pick, task in ranked:
        chosen.setdefault(task, pick)
    return list(chosen.items())[:count]


@dataclass(frozen=True)
class _Known:
    """One tree with all that is known of it."""

    tree: Sequence[Row]
    children: list[list[int]]
    values: list[float]
    """The tree's own."""
    q: list[float | None]
    """What `annotate.labels.q` says, which advantages and pairs go by; None where it says nothing."""
    labels: Mapping[int, Row]
    pairs: Sequence[Row]
    path: list[int]
    """The most visited way, the root first."""
    ends: dict[int, str]
    """Node -> how the episode ended there."""

    @classmethod
    def of(cls, tree: Sequence[Row], labels: Sequence[Row], pairs: Sequence[Row], params: Annotate) -> _Known:
        ends = {
            row["node"]: "success" if hard(row) else "truncated" if row["truncated"] else "failure" for row in tree if ended(row)
        }
        path = [row["node"] for row in most_visited_path(tree)]
        known = {label["node"]: label for label in labels}
        q = [value if weighed(row, params, 1) else None for row, value in zip(tree, node_q(tree, params), strict=True)]
        return cls(tree, children_of(tree), tree_values(tree, params), q, known, pairs, path, ends)


def _quoted(row: Row) -> str:
    return f"“{short(row['action'], 60)}”"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _two(value: float) -> str:
    """Two digits, halves up, as the page's script rounds."""
    return f"{value + 1e-9:.2f}"


def story(known: _Known) -> str:
    """What a tree shows, in plain sentences: how often the policy succeeds, what the search preferred, the clearest pair."""
    tree, root = known.tree, known.tree[0]
    kinds = [known.ends[node] for node in known.ends]
    said = []
    if root["n_rollouts"]:
        said.append(
            f"Left to itself, the policy succeeds in {root['n_success']} of {root['n_rollouts']} rollouts from the start."
        )
    found = f"{_count(root['N'], 'visit')} made {_count(len(tree), 'node')}"
    names = {
        "success": ("solves the task", "solve the task"),
        "failure": ("fails", "fail"),
        "truncated": ("is cut off", "are cut off"),
    }
    parts = [f"{kinds.count(kind)} {name[kinds.count(kind) > 1]}" for kind, name in names.items() if kind in kinds]
    said.append(found + (f"; of the ends, {', '.join(parts)}." if parts else ", and no end."))
    if len(known.path) > 1:
        first = tree[known.path[1]]
        said.append(
            f"Most visits ({first['N']}) went to {_quoted(first)}, worth {_two(known.values[first['node']])}, against "
            f"{_two(known.values[0])} for the start."
        )
    if known.pairs:
        best = min(known.pairs, key=lambda pair: (-pair["margin"], pair["parent"], pair["win"], pair["lose"]))
        count, win, lose = _count(len(known.pairs), "pair"), tree[best["win"]], tree[best["lose"]]
        said.append(
            f"It gives {count} to learn from, the clearest at depth {win['depth']}: {_quoted(win)} rather than {_quoted(lose)}, "
            f"{_two(best['margin'])} apart."
        )
    else:
        said.append("No two actions differ enough for a pair.")
    return " ".join(said)


def _number(value: float | None, digits: int = 3) -> float | int | None:
    if value is None:
        return None
    rounded = round(float(value), digits)
    return int(rounded) if rounded == int(rounded) else rounded


def opening_text(root: Row, tokenizer: Any | None) -> str:
    """What the policy reads before its first action; without a tokenizer the environment's part of it alone."""
    if tokenizer is None or not root.get("context_ids"):
        return root["observation"]
    return tokenizer.decode(list(root["context_ids"]), skip_special_tokens=True).strip()


def _node(known: _Known, row: Row, probability: float | None) -> dict[str, Any]:
    """One node for the page; keys whose value says nothing are left out."""
    label: Mapping[str, Any] = known.labels.get(row["node"], {})
    packed = {
        "parent": row["parent"],
        "action": short(row["action"], ACTION),
        "answer": short(row["observation"], OBSERVATION),
        "N": row["N"],
        "Q": _number(known.values[row["node"]]) if row["N"] else None,
        "q": _number(known.q[row["node"]]),
        "prior": _number(probability),
        "logprob": _number(row["prior"]) if row["node"] else None,
        "right": row["n_success"],
        "rollouts": row["n_rollouts"],
        "model": _number(row.get("model_value")),
        "reward": _number(row["reward"]) or None,
        "end": known.ends.get(row["node"]),
        "error": _number(label.get("stderr")),
        "advantage": _number(label.get("advantage")),
        "process": _number(label.get("process")) if row["node"] else None,
        "away": label.get("steps_to_success"),
    }
    return {name: value for name, value in packed.items() if value is not None and value != ""}


@dataclass(frozen=True)
class Grown:
    """A domain's trees: rows of nodes, labels and pairs, and the section annotate that they were made with."""

    nodes: Sequence[Row]
    labels: Sequence[Row]
    pairs: Sequence[Row]
    params: Annotate

    def of(self, task: str) -> Grown:
        """One task's."""
        own = [[row for row in rows if row["task_id"] == task] for rows in (self.nodes, self.labels, self.pairs)]
        return Grown(*own, self.params)


def pack(domain: str, pick: str, grown: Grown, tokenizer: Any | None) -> dict[str, Any]:
    """One tree for the page: `nodes` by number, `path` the most visited way, `pairs` [win, lose, margin, weight]; `range` of the
    tree's values, `by` what the labels' q is."""
    (tree,) = trees_of(grown.nodes).values()
    known = _Known.of(tree, grown.labels, grown.pairs, grown.params)
    probabilities: dict[int, float] = {}
    for siblings in filter(None, known.children):
        priors = softmax([tree[child]["prior"] for child in siblings], grown.params.selection.prior_temperature)
        probabilities |= dict(zip(siblings, priors, strict=True))
    nodes = [_node(known, row, probabilities.get(row["node"])) for row in tree]
    nodes[0]["answer"] = short(opening_text(tree[0], tokenizer), OBSERVATION)
    return {
        "task": tree[0]["task_id"],
        "domain": domain,
        "pick": pick,
        "story": story(known),
        "nodes": nodes,
        "path": known.path,
        "range": [grown.params.low, grown.params.high],
        "by": grown.params.labels.q,
        "pairs": [[pair["win"], pair["lose"], _number(pair["margin"]), _number(pair["weight"])] for pair in grown.pairs],
    }


def forest(
    domains: Mapping[str, Grown], count: int, tokenizer: Any | None, seed: int, limit: int = BYTES
) -> tuple[list[dict[str, Any]], int]:
    """`count` packed trees per domain within `limit` bytes of JSON, and how many were chosen before the limit."""
    packed, asked = [], 0
    for domain, grown in domains.items():
        left = limit // len(domains)
        for task, pick in choose(grown.nodes, grown.pairs, count, seed, "report_trees", domain):
            asked += 1
            one = pack(domain, pick, grown.of(task), tokenizer)
            left -= len(json.dumps(one, separators=(",", ":")))
            if left >= 0:
                packed.append(one)
    return packed, asked
