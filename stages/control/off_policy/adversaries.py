"""Adversarial changes of the state: those that critics' slopes are penalised by, and those that make targets robust.

After what is known of Zheng et al., arXiv 2302.01244: where changes start, and whether targets are perturbed, are not confirmed
to be the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from stages.values.lipschitz import Values, adversary, slope_penalty

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
    moved, still = values(state + change * scale), values(state[None])
    return ((moved - (still.detach() if settings.stop_clean else still)) ** 2).mean(1).sum()


def better_end(values: Values, state: Tensor, settings: CriticLipschitz, scale: Tensor) -> Tensor:
    """Changes [N, B, S] of states [B, S], as long as may be, along the slope or against it, whichever changes the value more."""
    change = torch.zeros(len(values(state[None]).detach()), *state.shape, requires_grad=True)
    still = values(state + change * scale)
    (slope,) = torch.autograd.grad(still.sum(), change)
    end = settings.epsilon * _direction(slope, settings)
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
    change, stride = start(settings, state, generator), 2.0 * settings.epsilon / settings.steps
    for _ in range(settings.steps):
        change = change.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(value(state + change * scale).sum(), change)
        with torch.no_grad():
            change = within(change - stride * _direction(slope, settings), settings)
            found = torch.minimum(found, value(state + change * scale))
    return found


def start(settings: CriticLipschitz, state: Tensor, generator: torch.Generator) -> Tensor:
    """Changes of states [B, S] drawn from the ball: uniform in every dimension, then cut to the ball."""
    return within(settings.epsilon * (2.0 * torch.rand(state.shape, generator=generator) - 1.0), settings)


def _direction(slope: Tensor, settings: CriticLipschitz) -> Tensor:
    return slope.sign() if settings.norm == "linf" else normalize(slope, dim=-1)


def within(change: Tensor, settings: CriticLipschitz) -> Tensor:
    """The nearest change in the ball."""
    if settings.norm == "linf":
        return change.clamp(-settings.epsilon, settings.epsilon)
    return change * (settings.epsilon / change.norm(dim=-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
