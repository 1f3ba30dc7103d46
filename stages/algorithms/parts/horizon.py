"""The horizon: the turn limit of training episodes, as a pure function of the step number.

It has no state between steps, so that a resumed run continues in the same stage (Xi et al., arXiv 2509.08755, increment a
counter, which skips a stage after a resume). Light to import.
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
    """Turn limit of training episodes. Evaluation always uses the environment's own limit."""

    data = ("episodes",)

    kind: Literal["environment", "fixed", "scaling_inter"] = "environment"
    """`environment`: the environment's own limit; `fixed`: `turns`; `scaling_inter`: in stages, by `rounds`."""
    turns: Annotated[Count | None, AppliesTo("kind", "fixed")] = None
    """fixed: the limit."""
    rounds: Annotated[Annotated[list[Count], Field(min_length=1)] | None, AppliesTo("kind", "scaling_inter")] = None
    """scaling_inter: the stages' limits, increasing; null: one third, two thirds and all of the environment's own limit."""
    steps_per_stage: Annotated[Count | None, AppliesTo("kind", "scaling_inter")] = None
    """scaling_inter: steps per stage; the last stage lasts to the end. null: rl.steps divided evenly."""
    order: Annotated[Literal["rising", "falling"], AppliesTo("kind", "scaling_inter")] = "rising"
    """scaling_inter: `falling` reverses the stages, as a control."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        horizon = values["horizon"]
        if horizon["kind"] == "scaling_inter" and horizon["steps_per_stage"] is None:
            horizon["steps_per_stage"] = math.ceil(values["steps"] / stage_count(horizon["rounds"]))

    def check(self, rl: Rl, method: Composition) -> None:
        if self.kind == "fixed" and self.turns is None:
            raise ParamsError("rl.horizon.kind: fixed needs rl.horizon.turns")
        if any(later <= earlier for earlier, later in pairwise(self.rounds or [])):
            raise ParamsError(f"rl.horizon.rounds must increase from stage to stage; got {self.rounds}")


STAGES = 3
"""Number of stages if `rounds` is null."""


def stage_count(rounds: Sequence[int] | None) -> int:
    """The number of stages."""
    return STAGES if rounds is None else len(rounds)


def limits(params: Horizon, longest: int) -> list[int]:
    """The stages' turn limits in order of time; `longest`: the environment's own limit.

    Raises ValueError for a limit above `longest`, which would have no effect.
    """
    if params.kind == "environment":
        return [longest]
    if params.kind == "fixed":
        assert params.turns is not None
        found = [params.turns]
    else:
        found = params.rounds or sorted({max(1, longest * stage // STAGES) for stage in range(1, STAGES + 1)})
    if found[-1] > longest:
        key = "turns" if params.kind == "fixed" else "rounds"
        raise ValueError(
            f"rl.horizon.{key} allows {found[-1]} turns, but the environment ends episodes after {longest}; lower it, or raise "
            f"max_turns in per_domain.<name>.environment"
        )
    return found[::-1] if params.order == "falling" and params.kind == "scaling_inter" else found


def turn_limit(params: Horizon, step: int, longest: int) -> int:
    """The turn limit at step `step` (from 0): that of stage min(floor(step / steps_per_stage), stages - 1)."""
    stages = limits(params, longest)
    return stages[min(step // params.steps_per_stage, len(stages) - 1)] if params.steps_per_stage else stages[0]
