"""Tree searches in the known worlds of stages/claims/known_tree.py, and settings of search modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.annotation.derived import uses_value_model
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree
from stages.claims.known_tree import Actions, Chat, FakeEngine, Pool, task, value

SIGNED: dict[str, Any] = {"reward_range": [-1.0, 1.0]}
"""Settings under which a failure counts as -1."""
EAGER = {"expansion": {"kind": "eager"}}
MODEL = {**EAGER, "evaluation": {"kind": "value_model"}, "labels": {"q": "tree"}}
MODES: dict[str, dict[str, Any]] = {
    "eager": {**EAGER, "labels": {"q": "tree"}},
    "eager_state": {"expansion": {"kind": "eager", "dedupe": "state", "drop_refused": True}, "evaluation": {"rollouts": 2}},
    "discarded": {**EAGER, "evaluation": {"keep_rollouts": False}, "labels": {"q": "tree"}},
    "value_model": MODEL,
    "rest": {
        **MODEL,
        "evaluation": {"kind": "value_model", "lookahead": 3},
        "selection": {"rule": "uct_2ln", "c": 0.7, "unvisited": "bonus"},
        "backup": "children_mean",
    },
    "own_engine": {**MODEL, "evaluation": {"kind": "value_model", "backbone": "own"}, "selection": {"rule": "puct"}},
    "lats": {**EAGER, "evaluation": {"kind": "mixed"}, "selection": {"rule": "uct_2ln", "unvisited": "value"}},
    "mixed": {"evaluation": {"kind": "mixed", "value_share": 0.3}},
    "critic": {**MODEL, "evaluation": {"kind": "value_model", "critic": "value"}, "selection": {"rule": "uct_1p"}},
    "qlass": {**MODEL, "backup": "discounted_max", "gamma": 0.9, "evaluation": {"kind": "value_model"}},
    "rstar": {**EAGER, "selection": {"c": 2.0, "decay": "exponential", "unvisited": "random"}},
    "signed": {**SIGNED, "cut_return": -0.5, "max_depth": 3},
    "random": {"selection": {"rule": "random"}},
    "omega": {"selection": {"rule": "omega", "c": 0.125}, "evaluation": {"rollouts": 4}},
    "flat": {"selection": {"rule": "flat"}, "evaluation": {"rollouts": 3}, "iterations": 4},
    "wu_uct": {"leaves_per_tree": 4},
    "virtual_loss": {**MODEL, "leaves_per_tree": 4, "virtual": "loss"},
    "budget": {"stop": {"policy_tokens": 60}},
}
"""Settings by search mode."""
ROOT = Edge("", (), (), "", (20,), 0.0, False, False, "")
"""The edge to the root of a tree that a test makes itself."""


class ExactReader:
    """A value model with exact values."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.batches: list[int] = []

    def values(self, sessions: Sequence[int]) -> list[float]:
        self.batches.append(len(sessions))
        return [self._value(self.engine.sessions[session]) for session in sessions]

    def _value(self, tokens: Sequence[int]) -> float:
        world, actions = tokens[0] - 20, tuple(token for token in tokens if token < 10)
        return value(world, actions)


def actions_of(tree: Tree, index: int) -> Actions:
    """Actions from the root to a node."""
    return tuple(tree.nodes[node].edge.token_ids[0] for node in tree.path(index)[1:])


def grow(
    names: Sequence[str],
    *,
    world: int = 0,
    kind: str = "coin",
    width: int = 3,
    threaded: bool = True,
    reader: ExactReader | None = None,
    **params: Any,
) -> list[Tree]:
    """Trees of one world for tasks that differ only in their names, and so in their random keys."""
    settings = Annotate(**params)
    engine = FakeEngine(width)
    if uses_value_model(settings.evaluation) and reader is None:
        reader = ExactReader(engine if settings.evaluation.backbone == "policy" else FakeEngine(width))
    search = Search(engine, Chat(), Pool(), settings, seed=5, max_length=10_000, threaded=threaded, reader=reader)
    return search.grow([task(name, world, kind) for name in names])
