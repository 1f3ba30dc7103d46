"""What a plan asks of the search."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stages.annotation.units import highest_worth, lowest_worth

if TYPE_CHECKING:
    from stages.annotation.tree import Edge, Tree


@dataclass(frozen=True)
class Play:
    """Turns of the policy from a node: a rollout to the end, a `draw` of its next action alone, or a few greedy turns `ahead`."""

    start: int
    number: int
    """Which rollout or draw of the node, for its random keys."""
    kind: Literal["rollout", "draw", "ahead"] = "rollout"
    turns: int | None = None
    """Most turns; None: to the end."""


@dataclass(frozen=True)
class Read:
    """Histories that the value model reads: their nodes get a `model_value`."""

    nodes: tuple[int, ...]


Plan = Generator[list[Play] | Read, list[list["Edge"]], None]
"""Yields work that is done at once; gets each play's turns, in the order asked for ([] for a reading)."""


def stopped(tree: Tree) -> bool:
    """Whether the tree's iterations, or one of its other limits, are reached."""
    params, stop = tree.params, tree.params.stop
    if tree.iterations >= params.iterations:
        return True
    first = tree.first_success if stop.on_success else None
    if first is not None and tree.iterations >= first + stop.extra_after_success:
        return True
    if stop.value is not None:
        lowest = lowest_worth(params)
        worth = lowest + (highest_worth(params) - lowest) * stop.value
        # An end that was drawn has its return for a value; a tree that stopped before its visit would not have backed it up.
        said = (node.model_value for node in tree.nodes if node.N or not node.ended)
        if any(value is not None and value >= worth for value in said):
            return True
    return spent(tree)


def spent(tree: Tree) -> bool:
    """Whether the tree has used up its environment steps or tokens."""
    stop = tree.params.stop
    limits = {"environment_steps": stop.environment_steps, "policy_tokens": stop.policy_tokens}
    return any(limit is not None and tree.counters[name] >= limit for name, limit in limits.items())
