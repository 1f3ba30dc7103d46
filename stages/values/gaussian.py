"""DSAC-T: critics of the return's distribution, and three refinements that keep their learning stable at any reward scale.

Expected targets (`expected_target`), twin distributions (`critics: 2`), and gradients clipped and scaled by the learnt spread
(`adjusted`); without all three it is DSAC. After Duan et al., arXiv 2310.05858, with the constants of the reference code. Used by
lane control (stages/control/off_policy) and by the critics of rl (`rl.critic.distribution`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss, softplus

from stages.records.card import Card
from stages.seeding import key64
from stages.values.settings import GaussianCritic, ReturnDistribution

CARD = Card(
    slug="dsac_t",
    title="DSAC-T",
    paper="Duan et al., arXiv 2310.05858",
    equation="w [h(Q, y) + s sg((s^2 - h(Q, y_c)) / (s + 0.1))], w = clip(b^2 / (s^2 + 0.1), 0.1, 10), b the running mean of the "
    "spread s; y = r + gamma (min_i Q_i' - alpha log pi'), y_c from a sample of that critic's return, clipped to Q +- 3 b",
    assumptions="returns are about Gaussian; continuous actions",
    reduces_to="spread constant, w = 1, no Huber bound: SAC",
    tested_by="tests/control/off_policy/test_dsac_t.py, tests/values/test_gaussian.py",
    switch="critic: gaussian of environment gymnasium, lane control; rl.critic.distribution: {}",
)
NOISE = 3.0
"""Samples of a return are at most this many standard deviations from its mean."""


def distribution(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [...] from a critic's outputs [..., 2]."""
    return outputs[..., 0], softplus(outputs[..., 1])


def sample(mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
    """Returns drawn from the distributions: the shape of `mean`."""
    return mean + std * torch.randn(mean.shape, generator=generator).clamp(-NOISE, NOISE)


def standard_normal(shape: tuple[int, ...], *key: object) -> Tensor:
    """Draws that `key` names, on the CPU, at most NOISE from 0."""
    generator = torch.Generator().manual_seed(key64(*key) % 2**63)
    return torch.randn(shape, generator=generator).clamp(-NOISE, NOISE)


def most_pessimistic(mean: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sample [B] of the critic with the smallest mean, from [N, B]."""
    chosen = mean.argmin(0, keepdim=True)
    return mean.gather(0, chosen)[0], sampled.gather(0, chosen)[0]


def running_spread(running: Tensor, std: Tensor, rate: float) -> Tensor:
    """The running mean [N] of the critics' spread after a batch with `std` [N, B]; nan: none yet."""
    mean = std.detach().mean(1)
    return torch.where(running.isnan(), mean, torch.lerp(running, mean, rate))


def losses(
    mean: Tensor,
    std: Tensor,
    expected: Tensor,
    sampled: Tensor,
    running: Tensor,
    settings: GaussianCritic,
    square: Tensor | None = None,
) -> Tensor:
    """Loss [...] of every prediction; only its gradient has a meaning, and it can be negative.

    mean, std [...]: predicted; expected, sampled: targets, and running: `running_spread`, all broadcast to their shape. square:
    the running mean of the spread's square, for `scale_of: variance`."""
    target = expected if settings.expected_target else sampled
    fixed, spread = mean.detach(), std.detach()
    bound = settings.clip * running if settings.adjusted else torch.full_like(running, settings.bound)
    clipped = fixed + torch.maximum(torch.minimum(sampled - fixed, bound), -bound)
    if not settings.adjusted:
        loss = 0.5 * (mean - target) ** 2 / (spread**2 + settings.std_eps)
        return loss + std * (spread**2 - (fixed - clipped) ** 2) / (spread**3 + settings.std_eps)
    error = _half_square(fixed, clipped, settings.huber) * (1.0 if settings.half else 2.0)
    scale = (running**2 if square is None else square) + settings.scale_eps
    ratio = (scale / (spread**2 + settings.std_eps)).clamp(*settings.ratio_range)
    of_mean = _half_square(mean, target, settings.huber)
    of_spread = std * (spread**2 - error) / (spread + settings.std_eps)
    return ratio * (of_mean + of_spread) if settings.scaled == "both" else ratio * of_mean + of_spread


def critic_loss(
    mean: Tensor,
    std: Tensor,
    expected: Tensor,
    sampled: Tensor,
    running: Tensor,
    settings: GaussianCritic,
    square: Tensor | None = None,
) -> Tensor:
    """Sum over critics of the batch's mean loss. mean, std: [N, B]; expected, sampled: targets [B]; running, square: [N]."""
    targets = expected.expand_as(mean), sampled.expand_as(mean)
    scale = None if square is None else square[:, None]
    return losses(mean, std, *targets, running[:, None], settings, scale).mean(1).sum()


def _half_square(value: Tensor, target: Tensor, huber: float | None) -> Tensor:
    return 0.5 * (value - target) ** 2 if huber is None else huber_loss(value, target, reduction="none", delta=huber)


class GaussianHead(nn.Module):
    """A `stages.values.contract.ValueHead` of two outputs, the mean and the softplus of the spread, for `copies` critics.

    `running` [copies], a buffer and so in checkpoints, begins with the spread of an output layer of zeros. `follow` moves it
    after an optimiser step, by the spread over the whole batch: neither micro-batches nor processes change it, and no further
    pass is needed. (The reference code moves it before the step.)
    """

    outputs = 2
    running: Tensor

    def __init__(self, settings: ReturnDistribution, copies: int = 1) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("running", torch.full((copies,), math.log(2.0)))

    def outside(self, target: Tensor) -> Tensor:
        """[...] bool, all False: there is no support."""
        return torch.zeros(target.shape, dtype=torch.bool, device=target.device)

    def encode(self, target: Tensor) -> Tensor:
        """Targets [...] as float32, without gradient."""
        return target.detach().float()

    def decode(self, logits: Tensor) -> Tensor:
        """Logits [..., 2] -> means [...]."""
        return logits.float()[..., 0]

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [..., 2] -> standard deviations [...]."""
        return distribution(logits.float())[1]

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits [..., 2] of one critic, returns [...], which are samples of their own distribution -> [...]."""
        target = self.encode(target)
        return losses(*distribution(logits.float()), target, target, self.running, self.settings)

    @torch.no_grad()
    def follow(self, means: Tensor) -> None:
        """means [copies]: each critic's mean spread over a batch."""
        self.running.lerp_(means.to(self.running), self.settings.spread_rate)
