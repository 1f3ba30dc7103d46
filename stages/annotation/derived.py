"""Values derived from section `annotate`: the tree's reward units, and what the search evaluates. Light to import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stages.environments.protocol import forgets
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate, Labels, LeafEvaluation
    from stages.values.settings import HeadParams

SOLUTION_RULES = ("flat", "omega")
"""Selection rules that sample whole solutions and measure their states."""
UNSCORED_RULES = ("random", *SOLUTION_RULES)
"""Selection rules that do not score children."""


def check_trees(params: Annotate, name: str, domain: object, returns: list[float]) -> None:
    """Raise ParamsError if section annotate does not fit a domain, whose episodes' returns lie in `returns`."""
    if params.returns != returns:
        raise ParamsError(
            f"params.yaml: in per_domain.{name}: its episodes' returns lie in {returns}, and annotate.returns is "
            f"{params.returns}: set per_domain.{name}.annotate.returns to {returns}"
        )
    if params.evaluation.model_rollouts is not None and not hasattr(domain, "imagined"):
        raise ParamsError(
            f"params.yaml: in per_domain.{name}: annotate.evaluation.model_rollouts needs numbers for the domain's states, as "
            f"keydoor gives them, and {name} gives none; set it to null"
        )
    read = {"evaluation.kind": uses_value_model(params.evaluation), "q_model.kind": params.q_model.kind != "none"}
    if forgets(domain) and (key := next((key for key, reads in read.items() if reads), None)):
        raise ParamsError(
            f"params.yaml: in per_domain.{name}: annotate.{key} fits a model to whole histories, of which the policy of {name} "
            f"does not see rejected results; set it to its default, or environment.judge.context to soft"
        )


def lowest_value(params: Annotate) -> float:
    """The worst return, in the tree's units."""
    return (params.returns if params.backup == "discounted_max" else params.reward_range)[0]


def highest_value(params: Annotate) -> float:
    """The best return, in the tree's units."""
    return (params.returns if params.backup == "discounted_max" else params.reward_range)[1]


def q_is_return(labels: Labels) -> bool:
    """Whether the labels' q is an expected return; hard and process measure a step differently."""
    return labels.q in ("rollout", "tree", "best")


def q_range(params: Annotate) -> tuple[float, float]:
    """Smallest and largest possible q of the labels."""
    if params.labels.scale == "min_max" or not q_is_return(params.labels):
        return 0.0, 1.0
    return (lowest_value(params), highest_value(params)) if params.labels.q == "tree" else (params.returns[0], params.returns[1])


def value_range(params: Annotate) -> tuple[float, float]:
    """Smallest and largest target of the step-value model: the returns if labels are returns, else 0 and 1."""
    return (params.returns[0], params.returns[1]) if q_is_return(params.labels) else (0.0, 1.0)


def value_head(params: Annotate) -> HeadParams:
    """`value_model.head`; a default support, made for targets in [0, 1], is rescaled to the model's value range."""
    head, (worst, best) = params.value_model.head, value_range(params)
    default = type(head)()
    if (head.v_min, head.v_max) != (default.v_min, default.v_max):
        return head
    # Rounded, so that rl.critic.head can name the same numbers.
    low, high = (round(worst + (best - worst) * end, 9) for end in (head.v_min, head.v_max))
    return head.model_copy(update={"v_min": low, "v_max": high})


def reward_scale(params: Annotate) -> float:
    """A reward of 1, in the tree's units."""
    if params.backup == "discounted_max":
        return 1.0
    return (highest_value(params) - lowest_value(params)) / (params.returns[1] - params.returns[0])


def pools_rollouts(params: Annotate) -> bool:
    """Whether labels correct for rollout counts that depend on earlier rollouts' outcomes (stages/annotation/pooling.py)."""
    return params.labels.pool and params.labels.q == "rollout" and params.selection.rule not in UNSCORED_RULES


def scaled_return(params: Annotate, total: float) -> float:
    """An episode's return, in the tree's units."""
    if params.backup == "discounted_max":
        return total
    worst, best = params.returns
    low, high = lowest_value(params), highest_value(params)
    return low + (high - low) * ((total - worst) / (best - worst))


def unscaled_return(params: Annotate, value: float) -> float:
    """The return that `scaled_return` maps to `value`."""
    if params.backup == "discounted_max":
        return value
    worst, best = params.returns
    low, high = lowest_value(params), highest_value(params)
    return worst + (best - worst) * ((value - low) / (high - low))


def unvisited_rule(params: Annotate) -> str:
    """`selection.unvisited`, resolved."""
    return params.selection.unvisited or ("zero" if params.selection.rule == "puct" else "first")


def uses_value_model(evaluation: LeafEvaluation) -> bool:
    """Whether leaf evaluation needs a value model."""
    return evaluation.kind != "rollout"


def evaluates_children(params: Annotate) -> bool:
    """Whether the value model evaluates children as soon as they are created."""
    return unvisited_rule(params) in ("value", "bonus") or params.evaluation.critic == "value"


def rollouts_only(params: Annotate) -> bool:
    """Whether all nodes and values come from rollouts, so that NODE_SCHEMA holds the whole tree."""
    return params.expansion.kind == "lazy" and not uses_value_model(params.evaluation)


def backbone_contradictions(params: Annotate, engine: str) -> Iterator[str]:
    """Why leaves can't be evaluated with `resources.engine.kind` engine."""
    leaves = params.evaluation
    if not uses_value_model(leaves):
        return
    if leaves.backbone == "own" and params.value_model.trains == "head":
        yield (
            "annotate.evaluation.backbone 'own' trains a copy of the policy, and value_model.trains is head: set it to all, or "
            "backbone to policy"
        )
    if leaves.backbone == "policy" and engine != "torch":
        yield (
            f"annotate.evaluation.backbone 'policy' reads the hidden states of the torch engine, and resources.engine.kind is "
            f"'{engine}': set backbone to own and value_model.trains to all, or kind to torch"
        )
