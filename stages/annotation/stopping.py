"""When a search plan stops growing its tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.annotation.derived import highest_value, lowest_value

if TYPE_CHECKING:
    from stages.annotation.tree import Tree


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
