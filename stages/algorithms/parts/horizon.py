"""The horizon: how many turns an episode may take while training, as a function of the step number alone.

Nothing is counted from one step to the next, so that a run that is killed and started again goes on in the stage that it was in
(Xi et al., arXiv 2509.08755, raise a counter, which after a resume passes over a stage). Light to import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.parts.part import AppliesTo, Part
from stages.runtime.validation import Count, ParamsError

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Horizon(Part):
    """How many turns an episode may take while training. Evaluation always plays to the environment's own limit."""

    data = ("episodes",)

    kind: Literal["environment", "fixed", "scaling_inter"] = "environment"
    """`environment`: its own limit; `fixed`: `turns`; `scaling_inter`: in stages, by `rounds`."""
    turns: Annotated[Count | None, AppliesTo("kind", "fixed")] = None
    """fixed: the limit."""
    rounds: Annotated[Annotated[list[Count], Field(min_length=1)] | None, AppliesTo("kind", "scaling_inter")] = None
    """scaling_inter: the stages' limits, rising; null: a third, two thirds and the whole of the environment's own limit."""
    steps_per_stage: Annotated[Count | None, AppliesTo("kind", "scaling_inter")] = None
    """scaling_inter: steps before the next stage; the last one stays. null: rl.steps shared out evenly."""
    order: Annotated[Literal["rising", "falling"], AppliesTo("kind", "scaling_inter")] = "rising"
    """scaling_inter: `falling` takes the stages from the last to the first, as a control."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        horizon = values["horizon"]
        if horizon["kind"] == "scaling_inter" and horizon["steps_per_stage"] is None:
            horizon["steps_per_stage"] = math.ceil(values["steps"] / stage_count(horizon["rounds"]))

    def check(self, rl: Rl, method: Composition) -> None:
        if self.kind == "fixed" and self.turns is None:
            raise ParamsError("rl.horizon.kind: fixed needs rl.horizon.turns")
        if any(later <= earlier for earlier, later in pairwise(self.rounds or [])):
            raise ParamsError(f"rl.horizon.rounds must rise from stage to stage; got {self.rounds}")


STAGES = 3
"""Stages where `rounds` is null."""


def stage_count(rounds: Sequence[int] | None) -> int:
    """How many stages there are."""
    return STAGES if rounds is None else len(rounds)


def limits(params: Horizon, longest: int) -> list[int]:
    """The stages' limits in turns, in the order in which they come; `longest`: the environment's own limit.

    Raises ValueError for a limit above `longest`, which would never be reached.
    """
    if params.kind == "environment":
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
