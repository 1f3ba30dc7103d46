"""The tree viewer's data: which search trees are shown, in a compact form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.annotation.derived import highest_value, lowest_value
from stages.annotation.nodes import Row, forgotten, path_to, trees_of
from stages.annotation.selection import softmax
from stages.records.forgotten import left_context
from stages.reporting.blocks import rounded
from stages.reporting.figures.data import short
from stages.reporting.figures.trees import example_tree
from stages.reporting.tree_summary import TreeData, meanings, summary
from stages.seeding import permutation

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

BYTES = 600_000
"""Limit of the viewer's data, shared by the domains; trees beyond it are left out, and the page says so."""
ACTION, OBSERVATION = 160, 700
"""Characters shown of an action and an observation."""
EVEN = "nearest half solved"
"""Why a domain's first tree is shown."""


def choose(
    nodes: Sequence[Row], pairs: Sequence[Row], count: int, *key: object, limits: tuple[float, float] = (0.0, 1.0)
) -> list[tuple[str, str]]:
    """`count` tasks with the reason for each: the tree nearest half solved, the one with most pairs (ties: the smaller, then the
    first), then random ones by `key`. `limits`: the lowest and highest value of a tree."""
    trees = trees_of(nodes)
    if not trees or not count:
        return []
    paired: dict[str, int] = {}
    for pair in pairs:
        paired[pair["task_id"]] = paired.get(pair["task_id"], 0) + 1
    ranked = [(EVEN, example_tree(nodes, limits)[0]["task_id"])]
    most = min((task for task in paired if task in trees), key=lambda task: (-paired[task], len(trees[task]), task), default=None)
    if most is not None:
        ranked.append(("most pairs", most))
    ranked += [("random", task) for task in permutation(sorted(trees), *key)]
    chosen: dict[str, str] = {}
    for pick, task in ranked:
        chosen.setdefault(task, pick)
    return list(chosen.items())[:count]


def opening_text(root: Row, tokenizer: Any | None) -> str:
    """The policy's prompt; without a tokenizer, the first observation."""
    if tokenizer is None or not root.get("context_ids"):
        return root["observation"]
    return tokenizer.decode(list(root["context_ids"]), skip_special_tokens=True).strip()


def left_on_path(tree: Sequence[Row], path: Sequence[int]) -> dict[int, int]:
    """Node of a path from the root whose observation left the context of later turns -> the turn after which it did, from 0."""
    return {path[turn + 1]: by for turn, by in left_context(forgotten(tree, path)).items()}


def _hides(tree: Sequence[Row], row: Row) -> int | None:
    """The node whose observation the turns after this one do not see, and this one did; None without one."""
    if not row.get("forgets"):
        return None
    left = left_on_path(tree, path_to(tree, row["node"]))
    return next((node for node, by in left.items() if by == row["depth"] - 1), None)


def _node(tree: TreeData, row: Row, probability: float | None) -> dict[str, Any]:
    """One node for the page, without empty values."""
    label: Mapping[str, Any] = tree.labels.get(row["node"], {})
    packed = {
        "parent": row["parent"],
        "action": short(row["action"], ACTION),
        "answer": short(row["observation"], OBSERVATION),
        "N": row["N"],
        "Q": rounded(tree.values[row["node"]]) if row["N"] else None,
        "q": rounded(tree.q[row["node"]]),
        "prior": rounded(probability),
        "logprob": rounded(row["prior"]) if row["node"] else None,
        "right": row["n_success"],
        "rollouts": row["n_rollouts"],
        "model": rounded(row.get("model_value")),
        "reward": rounded(row["reward"]) or None,
        "end": tree.ends.get(row["node"]),
        "hides": _hides(tree.nodes, row),
        "error": rounded(label.get("stderr")),
        "advantage": rounded(label.get("advantage")),
        "process": rounded(label.get("process")) if row["node"] else None,
        "away": label.get("steps_to_success"),
    }
    return {name: value for name, value in packed.items() if value is not None and value != ""}


@dataclass(frozen=True)
class DomainTrees:
    """A domain's trees: rows of nodes, labels and pairs, and the settings they were made with."""

    nodes: Sequence[Row]
    labels: Sequence[Row]
    pairs: Sequence[Row]
    params: Annotate

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest value of a tree."""
        return lowest_value(self.params), highest_value(self.params)

    def of(self, task: str) -> DomainTrees:
        """The rows of one task."""
        nodes, labels, pairs = ([row for row in rows if row["task_id"] == task] for rows in (self.nodes, self.labels, self.pairs))
        return DomainTrees(nodes, labels, pairs, self.params)


def pack(domain: str, pick: str, grown: DomainTrees, tokenizer: Any | None) -> dict[str, Any]:
    """One tree for the page: `nodes` by number, the most visited `path`, `pairs` [win, lose, margin, weight], the `range` of its
    values, `words` for the meaning of its numbers. A node's `prior` is the softmax over its tried siblings; it `hides` the
    observation of the node of that number from the turns after its own."""
    (nodes,) = trees_of(grown.nodes).values()
    tree = TreeData.of(nodes, grown.labels, grown.pairs, grown.params)
    probabilities: dict[int, float] = {}
    for siblings in (children for children in tree.children if len(children) > 1):
        priors = softmax([nodes[child]["prior"] for child in siblings], grown.params.selection.prior_temperature)
        probabilities |= dict(zip(siblings, priors, strict=True))
    packed = [_node(tree, row, probabilities.get(row["node"])) for row in nodes]
    packed[0]["answer"] = short(opening_text(nodes[0], tokenizer), OBSERVATION)
    return {
        "task": nodes[0]["task_id"],
        "domain": domain,
        "pick": pick,
        "summary": summary(tree),
        "nodes": packed,
        "path": tree.path,
        "range": list(grown.limits),
        "words": meanings(grown.params),
        "pairs": [[pair["win"], pair["lose"], rounded(pair["margin"]), rounded(pair["weight"])] for pair in grown.pairs],
    }


def forest(
    domains: Mapping[str, DomainTrees], count: int, tokenizer: Any | None, seed: int, limit: int = BYTES
) -> tuple[list[dict[str, Any]], int]:
    """`count` packed trees per domain within `limit` bytes of JSON, and how many were chosen before the limit."""
    packed, chosen = [], 0
    for domain, grown in domains.items():
        left = limit // len(domains)
        for task, pick in choose(grown.nodes, grown.pairs, count, seed, "report_trees", domain, limits=grown.limits):
            chosen += 1
            one = pack(domain, pick, grown.of(task), tokenizer)
            left -= len(json.dumps(one, separators=(",", ":")))
            if left >= 0:
                packed.append(one)
    return packed, chosen
