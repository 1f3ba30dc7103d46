"""A small space of agent designs with made-up scores, and searches of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

from stages.designs.search import Search
from stages.designs.settings import parse_search
from stages.designs.space import FACTORS, Design, Space
from stages.designs.tree import Node
from stages.designs.value_model import FittedValueModel

Row = tuple[int, ...]
SPACE: dict[str, Any] = {
    "model": ["sft"],
    "choose": ["none", "vote"],
    "think": ["none"],
    "window": [1, 2, None],
    "recall": ["none", "action", "task"],
    "draws": [3, 5],
    "temperature": [0.0, 0.5, 1.0],
    "top_p": [0.95],
}
TASKS = {"search": {"difficulty": 2.0, "prompt_words": 9.0, "max_turns": 8.0}}


def settings(space: dict[str, Any] | None = None, **design: Any) -> Any:
    return parse_search({"domains": ["search"], "per_domain": {"search": {}}, "design": {"space": space or SPACE, **design}})


def search(params: Any, seed: int = 0, value_model: Any = None) -> Search:
    space = Space.of(params)
    if params.design.method == "agentswift" and value_model is None:
        value_model = FittedValueModel(space, TASKS, params.design.value_model)
    return Search(space, params.design, seed, value_model)


def true_score(space: Space, design: Design) -> float:
    """A made-up score in [0, 1]: mostly additive, with one interaction."""
    value = dict(zip((factor.name for factor in FACTORS), design, strict=True))
    found = 0.4 - 0.2 * abs(value["temperature"] - 0.5) + 0.1 * (value["choose"] == "vote") - 0.15 * (value["recall"] == "action")
    found += {1: -0.1, 2: 0.05, None: 0.0}[value["window"]] + 0.1 * (value["recall"] == "task" and value["window"] == 2)
    return round(found + 0.02 * (value["draws"] == 5 and value["choose"] == "vote"), 6)


def node(score: float, parent: int = 0, predicted: float | None = None, **more: Any) -> Node:
    values = {"design": (), "origin": "tree", "error": 0.0, "by_domain": {}, **more}
    return Node(score=score, parent=parent, predicted=predicted, **values)


def run(one: Search, score_of: Any = true_score, budget: int | None = None) -> list[Node]:
    nodes: list[Node] = []
    while (proposal := one.propose(nodes)) is not None and len(nodes) != budget:
        score = score_of(one.space, proposal.design)
        nodes.append(Node(**proposal.__dict__, score=score, error=0.02, by_domain={"search": (score, 0.02)}))
    return nodes


def uncovered(rows: Sequence[Row], sizes: Sequence[int], strength: int) -> set[tuple[Row, Row]]:
    """(factors, options) of the combinations that no row has; empty for a covering array."""
    return {
        (factors, options)
        for factors in combinations(range(len(sizes)), strength)
        for options in product(*(range(sizes[factor]) for factor in factors))
        if not any(all(row[factor] == option for factor, option in zip(factors, options, strict=True)) for row in rows)
    }
