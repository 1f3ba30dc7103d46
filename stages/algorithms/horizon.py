"""The horizon: how many turns an episode may take while training, as a function of the step number alone.

Nothing is counted from one step to the next, so that a run that is killed and started again goes on in the stage that it was in
(Xi et al., arXiv 2509.08755, raise a counter, which after a resume passes over a stage). Light to import.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.parameters.rl import Horizon

STAGES = 3
"""Stages where `rounds` is null."""


def stage_count(rounds: Sequence[int] | None) -> int:
    """How many stages there are."""
    return STAGES if rounds is None else len(rounds)


def limits(params: Horizon, longest: int) -> list[int]:
    """The stages' limits in turns, in the order in which they come; `longest`: the environment's own limit.

    Raises ValueError for a limit above `longest`, which would never be reached.
    """
    if params.kind in ("environment", None):
        return [longest]
    if params.kind == "fixed":
        found = [params.turns or longest]
    else:
        found = params.rounds or sorted({max(1, longest * stage // STAGES) for stage in range(1, STAGES + 1)})
    if found[-1] > longest:
        key = "turns" if params.kind == "fixed" else "rounds"
        raise ValueError(
            f"rl.horizon.{key} goes up to {found[-1]} turns, and the environment ends an episode after {longest}; lower it, or "
            f"raise max_turns in per_domain.<name>.environment"
        )
    return found[::-1] if params.order == "falling" and params.kind == "scaling_inter" else found


def turn_limit(params: Horizon, step: int, longest: int) -> int:
    """Turns that an episode of step `step` (from 0) may take: stage min(floor(step / steps_per_stage), stages - 1)."""
    stages = limits(params, longest)
    return stages[min(step // (params.steps_per_stage or 1), len(stages) - 1)]
