"""Requests of a search plan: policy turns and values. Also when a plan stops."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stages.annotation.units import highest_value, lowest_value

if TYPE_CHECKING:
    from stages.annotation.tree import Edge, Tree


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


def stopped(tree: Tree) -> bool:
    """Whether the tree has reached its iterations or another limit."""
    params, stop = tree.params, tree.params.stop
    if tree.iterations >= params.iterations:
        return True
    first = tree.first_success if stop.on_success else None
    if first is not None and tree.iterations >= first + stop.extra_after_success:
        return True
    if stop.value is not None:
        lowest = lowest_value(params)
        threshold = lowest + (highest_value(params) - lowest) * stop.value
        # A drawn end's model_value is its return; before its first visit that is not backed up yet.
        values = (node.model_value for node in tree.nodes if node.N or not node.ended)
        if any(value is not None and value >= threshold for value in values):
            return True
    return spent(tree)


def spent(tree: Tree) -> bool:
    """Whether the tree has used up its environment steps or tokens."""
    stop = tree.params.stop
    limits = {"environment_steps": stop.environment_steps, "policy_tokens": stop.policy_tokens}
    return any(limit is not None and tree.counters[name] >= limit for name, limit in limits.items())
