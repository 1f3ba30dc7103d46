"""The policy."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from stages.control.off_policy.critics import UnitFeatures
from stages.values.ensemble import Ensemble

LOG_STD = (-20.0, 2.0)
"""Range of the logarithm of the policy's standard deviation before tanh, where settings have none."""
CONSTANT = 0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0)
"""Subtracted from each dimension's log-density: log sqrt(2 pi) of the Gaussian and log 4 of the slope of tanh."""


class Policy(nn.Module):
    """A Gaussian through tanh: actions between -1 and 1."""

    def __init__(
        self,
        observations: int,
        actions: int,
        width: int,
        layers: int,
        activation: str = "relu",
        log_std: tuple[float, float] = LOG_STD,
        unit_features: bool = False,
    ) -> None:
        super().__init__()
        self.log_std = log_std
        kind = UnitFeatures if unit_features else Ensemble
        self.network = kind(1, observations, width, layers, 2 * actions, activation)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the standard deviation, [B, A], before tanh."""
        mean, log_std = self.network(observation).squeeze(0).chunk(2, -1)
        return mean, log_std.clamp(*self.log_std)

    def sample(self, observation: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Actions [B, A] and their log-densities [B]; gradients pass through the draw."""
        mean, log_std = self(observation)
        noise = torch.randn(mean.shape, generator=generator)
        before = torch.addcmul(mean, log_std.exp(), noise)
        # the Gaussian's, less the logarithm of the slope of tanh, 2 (log 2 - before - softplus(-2 before))
        fixed = noise.square().mul_(-0.5).sub_(CONSTANT)
        log_density = torch.add(fixed - log_std, before + softplus(-2.0 * before), alpha=2.0)
        return torch.tanh(before), log_density.sum(-1)

    @torch.no_grad()
    def greedy(self, observation: Tensor) -> Tensor:
        """The middle actions [B, A]."""
        return torch.tanh(self(observation)[0])
