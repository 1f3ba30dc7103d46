"""Adversarial changes of the state: those that critics' slopes are penalised by, and those that make targets robust.

After what is known of Zheng et al., arXiv 2302.01244: where changes start, and whether targets are perturbed, are not confirmed
to be the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.values.lipschitz import Values, adversary, random_start, slope_penalty, squared_change, steepest, within

if TYPE_CHECKING:
    from stages.control.off_policy.settings import CriticLipschitz


def penalty(values: Values, state: Tensor, settings: CriticLipschitz, scale: Tensor, generator: torch.Generator) -> Tensor:
    """`slope_penalty` of states [B, S]; with `start: both_signs`, its ascent begins at the better end of the slope's sign."""
    if settings.start == "random":
        return slope_penalty(values, state, settings, scale, generator)
    change = better_end(values, state, settings, scale)
    if settings.steps > 1:
        later = settings.model_copy(update={"steps": settings.steps - 1})
        change = adversary(values, state, later, scale, change)
    return squared_change(values, state, change, settings, scale)


def better_end(values: Values, state: Tensor, settings: CriticLipschitz, scale: Tensor) -> Tensor:
    """Changes [N, B, S] of states [B, S], as long as may be, along the slope or against it, whichever changes the value more."""
    change = torch.zeros(len(values(state[None]).detach()), *state.shape, requires_grad=True)
    still = values(state + change * scale)
    (slope,) = torch.autograd.grad(still.sum(), change)
    end = settings.epsilon * steepest(slope, settings)
    with torch.no_grad():
        up, down = ((values(state + one * scale) - still).abs() for one in (end, -end))
    return torch.where((up >= down)[..., None], end, -end)


def lowest(
    value: Callable[[Tensor], Tensor], state: Tensor, settings: CriticLipschitz, scale: Tensor, generator: torch.Generator
) -> Tensor:
    """The smallest value [B] that projected descent from a random start finds within the ball around states [B, S]; at most the
    value of the states themselves. value: states [B, S] -> [B]."""
    with torch.no_grad():
        found = value(state)
    change, stride = random_start(settings, 1, state, generator)[0], 2.0 * settings.epsilon / settings.steps
    for _ in range(settings.steps):
        change = change.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(value(state + change * scale).sum(), change)
        with torch.no_grad():
            change = within(change - stride * steepest(slope, settings), settings)
            found = torch.minimum(found, value(state + change * scale))
    return found
