"""What the settings of annotate come to: the tree's units, and what the search reads. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.parameters.annotate import Annotate, LeafEvaluation


def lowest_worth(params: Annotate) -> float:
    """What the worst return counts as in the tree."""
    return (params.returns if params.backup == "discounted_max" else params.reward_range)[0]


def highest_worth(params: Annotate) -> float:
    """What the best return counts as in the tree."""
    return (params.returns if params.backup == "discounted_max" else params.reward_range)[1]


def q_range(params: Annotate) -> tuple[float, float]:
    """Within what the labels' q lies."""
    if params.labels.scale == "min_max" or params.labels.q in ("rollout", "hard", "process"):
        return 0.0, 1.0
    return (lowest_worth(params), highest_worth(params)) if params.labels.q == "tree" else (params.returns[0], params.returns[1])


def value_range(params: Annotate) -> tuple[float, float]:
    """Within what the step-value model's targets lie: returns where labels are, else shares."""
    return (params.returns[0], params.returns[1]) if params.labels.q in ("tree", "best") else (0.0, 1.0)


def worth(params: Annotate, total: float) -> float:
    """What an episode of return `total` counts as in the tree."""
    if params.backup == "discounted_max":
        return total
    worst, best = params.returns
    low, high = lowest_worth(params), highest_worth(params)
    return low + (high - low) * ((total - worst) / (best - worst))


def return_of(params: Annotate, value: float) -> float:
    """The return that counts as `value` in the tree."""
    if params.backup == "discounted_max":
        return value
    worst, best = params.returns
    low, high = lowest_worth(params), highest_worth(params)
    return worst + (best - worst) * ((value - low) / (high - low))


def unvisited_score(params: Annotate) -> str:
    """`selection.unvisited`, resolved."""
    return params.selection.unvisited or ("zero" if params.selection.rule == "puct" else "first")


def reads_values(evaluation: LeafEvaluation) -> bool:
    """Whether the search needs a value model."""
    return evaluation.kind != "rollout"


def values_children(params: Annotate) -> bool:
    """Whether the value model reads children as soon as they are there."""
    return unvisited_score(params) in ("value", "bonus") or params.evaluation.critic == "value"


def plain(params: Annotate) -> bool:
    """Whether NODE_SCHEMA tells all there is of a tree: rollouts alone make its nodes and its values."""
    return params.expansion.kind == "lazy" and not reads_values(params.evaluation)
