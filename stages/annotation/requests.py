"""Requests of a search plan: policy turns and values."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stages.annotation.tree import Edge


@dataclass(frozen=True)
class TurnRequest:
    """Policy turns from a node: a rollout to the end, a `draw` of only the next action, or a few greedy turns `ahead`."""

    start: int
    number: int
    """Index of the node's rollout or draw; keys its random stream."""
    kind: Literal["rollout", "draw", "ahead"] = "rollout"
    turns: int | None = None
    """At most; None: to the end."""


@dataclass(frozen=True)
class ValueRequest:
    """Nodes whose histories the value model evaluates into `model_value`."""

    nodes: tuple[int, ...]


SearchPlan = Generator[list[TurnRequest] | ValueRequest, list[list["Edge"]], None]
"""Yields requests to run as one batch; receives each turn request's edges, in order ([] for a value request)."""
