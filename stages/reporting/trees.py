"""The tree viewer's data: which search trees are shown, and a compact form of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.annotation.nodes import Row, trees_of
from stages.annotation.selection import softmax
from stages.annotation.units import highest_value, lowest_value
from stages.reporting.figures.data import short
from stages.reporting.figures.trees import telling_tree
from stages.reporting.tree_words import Known, meanings, story
from stages.seeding import permutation

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

BYTES = 600_000
"""Limit of the viewer's data on the page, shared by the domains; what does not fit is left out and the page says so."""
ACTION, OBSERVATION = 160, 700
"""Letters of an action and of an answer that are shown."""
EVEN = "nearest half solved, half failed"
"""Why a domain's first tree is shown."""


def choose(
    nodes: Sequence[Row], pairs: Sequence[Row], count: int, *key: object, limits: tuple[float, float] = (0.0, 1.0)
) -> list[tuple[str, str]]:
    """`count` tasks with trees, each with why it was picked: the one nearest half solved, the one with most pairs (of equals the
    smaller tree, then the first), then at random by `key`. `limits`: the worst and the best value of a tree."""
    trees = trees_of(nodes)
    if not trees or not count:
        return []
    paired: dict[str, int] = {}
    for pair in pairs:
        paired[pair["task_id"]] = paired.get(pair["task_id"], 0) + 1
    ranked = [(EVEN, telling_tree(nodes, limits)[0]["task_id"])]
    most = min((task for task in paired if task in trees), key=lambda task: (-paired[task], len(trees[task]), task), default=None)
    if most is not None:
        ranked.append(("most pairs", most))
    ranked += [("at random", task) for task in permutation(sorted(trees), *key)]
    chosen: dict[str, str] = {}
    for pick, task in ranked:
        chosen.setdefault(task, pick)
    return list(chosen.items())[:count]


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


def _node(known: Known, row: Row, probability: float | None) -> dict[str, Any]:
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

    @property
    def limits(self) -> tuple[float, float]:
        """The worst and the best value of a tree."""
        return lowest_value(self.params), highest_value(self.params)

    def of(self, task: str) -> Grown:
        """One task's."""
        own = [[row for row in rows if row["task_id"] == task] for rows in (self.nodes, self.labels, self.pairs)]
        return Grown(*own, self.params)


def pack(domain: str, pick: str, grown: Grown, tokenizer: Any | None) -> dict[str, Any]:
    """One tree for the page: `nodes` by number, `path` the most visited way, `pairs` [win, lose, margin, weight]; `range` of the
    tree's values, `words` for what its numbers mean. `prior` is the share of an action among several that were tried."""
    (tree,) = trees_of(grown.nodes).values()
    known = Known.of(tree, grown.labels, grown.pairs, grown.params)
    probabilities: dict[int, float] = {}
    for siblings in (children for children in known.children if len(children) > 1):
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
        "range": list(grown.limits),
        "words": meanings(grown.params),
        "pairs": [[pair["win"], pair["lose"], _number(pair["margin"]), _number(pair["weight"])] for pair in grown.pairs],
    }


def forest(
    domains: Mapping[str, Grown], count: int, tokenizer: Any | None, seed: int, limit: int = BYTES
) -> tuple[list[dict[str, Any]], int]:
    """`count` packed trees per domain within `limit` bytes of JSON, and how many were chosen before the limit."""
    packed, asked = [], 0
    for domain, grown in domains.items():
        left = limit // len(domains)
        for task, pick in choose(grown.nodes, grown.pairs, count, seed, "report_trees", domain, limits=grown.limits):
            asked += 1
            one = pack(domain, pick, grown.of(task), tokenizer)
            left -= len(json.dumps(one, separators=(",", ":")))
            if left >= 0:
                packed.append(one)
    return packed, asked
