"""DSAC-T: critics of the return's distribution, and three refinements that keep their learning stable at any reward scale.

Expected targets (`expected_target`), twin distributions (`critics: 2`), and gradients clipped and scaled by the learnt spread
(`adjusted`); without all three it is DSAC. After Duan et al., arXiv 2310.05858, with the constants of the reference code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, softplus

from stages.control.off_policy.settings import GaussianCritic
from stages.records.card import Card

CARD = Card(
    slug="dsac_t",
    title="DSAC-T",
    paper="Duan et al., arXiv 2310.05858",
    equation="w [h(Q, y) + s sg((s^2 - h(Q, y_c)) / (s + 0.1))], w = clip(b^2 / (s^2 + 0.1), 0.1, 10), b the running mean of the "
    "spread s; y = r + gamma (min_i Q_i' - alpha log pi'), y_c from a sample of that critic's return, clipped to Q +- 3 b",
    assumptions="returns are about Gaussian; continuous actions",
    reduces_to="spread constant, w = 1, no Huber bound: SAC",
    tested_by="tests/control/off_policy/test_dsac_t.py",
    switch="critic: gaussian of environment gymnasium, lane control",
)
SMALL = 0.1
"""Added to divisors."""
RATIO = (0.1, 10.0)
"""Range of the gradients' scale."""
NOISE = 3.0
"""Samples of a return are at most this many standard deviations from its mean."""


def distribution(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [N, B] from a critic's outputs [N, B, 2]."""
    return outputs[..., 0], softplus(outputs[..., 1])


def sample(mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
    """Returns drawn from the distributions: the shape of `mean`."""
    return mean + std * torch.randn(mean.shape, generator=generator).clamp(-NOISE, NOISE)


def most_pessimistic(mean: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sample [B] of the critic with the smallest mean, from [N, B]."""
    chosen = mean.argmin(0, keepdim=True)
    return mean.gather(0, chosen)[0], sampled.gather(0, chosen)[0]


def running_spread(running: Tensor, std: Tensor, rate: float) -> Tensor:
    """The running mean [N] of the critics' spread after a batch with `std` [N, B]; nan: none yet."""
    mean = std.detach().mean(1)
    return torch.where(running.isnan(), mean, torch.lerp(running, mean, rate))


def critic_loss(
    mean: Tensor, std: Tensor, expected: Tensor, sampled: Tensor, running: Tensor, settings: GaussianCritic
) -> Tensor:
    """Sum over critics of the batch's mean loss; only its gradient has a meaning.

    mean, std: [N, B]; expected, sampled: targets [B]; running: `running_spread` [N]."""
    target = (expected if settings.expected_target else sampled).expand_as(mean)
    fixed, spread = mean.detach(), std.detach()
    bound = settings.clip * running[:, None] if settings.adjusted else torch.full_like(running, settings.bound)[:, None]
    clipped = fixed + torch.maximum(torch.minimum(sampled - fixed, bound), -bound)
    if not settings.adjusted:
        loss = 0.5 * (mean - target) ** 2 / (spread**2 + SMALL)
        loss = loss + std * (spread**2 - (fixed - clipped) ** 2) / (spread**3 + SMALL)
        return loss.mean(1).sum()
    error = _half_square(fixed, clipped, settings.huber) * (1.0 if settings.half else 2.0)
    ratio = (running[:, None] ** 2 / (spread**2 + SMALL)).clamp(*RATIO)
    loss = _half_square(mean, target, settings.huber) + std * (spread**2 - error) / (spread + SMALL)
    return (ratio * loss).mean(1).sum()


def _half_square(value: Tensor, target: Tensor, huber: float | None) -> Tensor:
    return 0.5 * (value - target) ** 2 if huber is None else huber_loss(value, target, reduction="none", delta=huber)
