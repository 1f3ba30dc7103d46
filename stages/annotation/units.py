"""What the settings of annotate come to: the tree's units, and what the search reads. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate, Labels, LeafEvaluation
    from stages.values.settings import HeadParams

MEASURING = ("flat", "omega")
"""Selection rules that measure states by solutions of their own."""
NO_SCORES = ("random", *MEASURING)
"""Selection rules that score no children."""


def lowest_worth(params: Annotate) -> float:
    """What the worst return counts as in the tree."""
    return (params.returns if params.backup == "discounted_max" else params.reward_range)[0]


def highest_worth(params: Annotate) -> float:
    """What the best return counts as in the tree."""
    return (params.returns if params.backup == "discounted_max" else params.reward_range)[1]


def is_return(labels: Labels) -> bool:
    """Whether the labels' q is a reward still to come; hard and process are other measures of a step."""
    return labels.q in ("rollout", "tree", "best")


def q_range(params: Annotate) -> tuple[float, float]:
    """Within what the labels' q lies."""
    if params.labels.scale == "min_max" or not is_return(params.labels):
        return 0.0, 1.0
    return (lowest_worth(params), highest_worth(params)) if params.labels.q == "tree" else (params.returns[0], params.returns[1])


def value_range(params: Annotate) -> tuple[float, float]:
    """Within what the step-value model's targets lie: the returns where labels are such, else 0 to 1."""
    return (params.returns[0], params.returns[1]) if is_return(params.labels) else (0.0, 1.0)


def value_head(params: Annotate) -> HeadParams:
    """`value_model.head`. The default support is laid around returns from 0 to 1; where the model learns others, it lies around
    these in the same way."""
    head, (worst, best) = params.value_model.head, value_range(params)
    default = type(head)()
    if (head.v_min, head.v_max) != (default.v_min, default.v_max):
        return head
    # Rounded, so that rl.critic.head can name the same numbers.
    low, high = (round(worst + (best - worst) * end, 9) for end in (head.v_min, head.v_max))
    return head.model_copy(update={"v_min": low, "v_max": high})


def unit(params: Annotate) -> float:
    """What a reward of 1 counts as in the tree."""
    if params.backup == "discounted_max":
        return 1.0
    return (highest_worth(params) - lowest_worth(params)) / (params.returns[1] - params.returns[0])


def pools_rollouts(params: Annotate) -> bool:
    """Whether labels go by rollouts whose number depends on what the first of them brought, and allow for that."""
    return params.labels.pool and params.labels.q == "rollout" and params.selection.rule not in NO_SCORES


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
