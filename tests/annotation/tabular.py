"""Tree searches in the known worlds of stages/claims/known_tree.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.annotation.derived import uses_value_model
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.annotation.tree import Tree
from stages.claims.known_tree import Actions, Chat, FakeEngine, Pool, task, value

SIGNED: dict[str, Any] = {"reward_range": [-1.0, 1.0]}
"""Settings under which a failure counts as -1."""


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
