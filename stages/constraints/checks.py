"""What a domain's constraint does not fit together with in the rest of params.yaml."""

from __future__ import annotations

from stages.constraints.settings import Constraint
from stages.runtime.run_params import RunParams


def contradiction(params: RunParams, constraint: Constraint | None, domain: str) -> str | None:
    """Why the constraint of a domain is invalid with these parameters, and the remedy; None if it is valid."""
    if constraint is None:
        return None
    engine = params.resources.engine.kind
    outside = [stage for stage in ("rollout", "annotate", "evaluate") if constraint.enforces(stage)]
    if params.model.thinking is not None:
        return "environment.constraint is about entire turns, and model.thinking cuts thoughts off; set one of the two to null"
    if engine != "torch" and constraint.enforcement in ("mask", "rollback") and outside:
        return (
            f"environment.constraint.enforcement {constraint.enforcement} masks tokens, which resources.engine.kind {engine} "
            f"can't: set enforcement to retry or report_only, or kind to torch"
        )
    if not constraint.renormalise and constraint.enforces("rl") and constraint.enforcement == "mask":
        sampling = params.section("rl", domain).sampling
        if sampling.top_k or sampling.top_p < 1.0:
            return (
                "environment.constraint.renormalise: false records probabilities among all tokens, and rl.sampling.top_k or "
                "top_p those among the kept ones, so that no update knows how likely a token was: set renormalise to true, or "
                "top_k to 0 and top_p to 1"
            )
    if params.evaluate.scaffold.think != "none":
        return (
            "evaluate.scaffold.think adds turns that environment.constraint does not know; set it to none and put thoughts into "
            "the specification, as react has them"
        )
    return None
