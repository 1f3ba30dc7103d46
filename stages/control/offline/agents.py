"""Agents that learn from a data set: behaviour cloning and implicit Q-learning.

IQL after Kostrikov et al., arXiv 2110.06169: V is an expectile of Q over the data's actions, Q's target is r + gamma V(s'), and
the policy clones the data's actions with weights exp(beta (Q - V)). No action outside the data is ever valued.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.updates import FlatAdam, follow
from stages.control.offline.settings import Offline
from stages.values.ensemble import Ensemble

LOG_STD = (-5.0, 2.0)
"""Range of the logarithm of the policy's standard deviation."""


class ClonePolicy(nn.Module):
    """A Gaussian around a mean between -1 and 1, with one spread per action dimension."""

    def __init__(self, observations: int, actions: int, width: int, layers: int) -> None:
        super().__init__()
        self.network = Ensemble(1, observations, width, layers, actions)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, observation: Tensor) -> Tensor:
        """Means [B, A]."""
        return torch.tanh(self.network(observation)[0])

    def log_density(self, observation: Tensor, action: Tensor) -> Tensor:
        """Of actions [B, A]: [B]."""
        log_std = self.log_std.clamp(*LOG_STD)
        scaled = (action - self(observation)) * (-log_std).exp()
        return (-0.5 * scaled**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """|expectile - 1[d < 0]| d^2 of differences target - prediction."""
    weight = torch.where(difference < 0, 1.0 - expectile, expectile)
    return weight * difference**2


class Clone(nn.Module):
    """Behaviour cloning, or with `method: iql` implicit Q-learning; `update` learns from one batch."""

    def __init__(self, settings: Offline, observations: int, actions: int) -> None:
        super().__init__()
        self.settings = settings
        sizes = (settings.width, settings.layers)
        self.policy = ClonePolicy(observations, actions, *sizes)
        self.values = settings.method == "iql"
        if self.values:
            self.critics = Ensemble(settings.critics, observations + actions, *sizes, 1)
            self.value = Ensemble(1, observations, *sizes, 1)
        learnt = list(self.parameters())
        if self.values:
            self.slow_critics = copy.deepcopy(self.critics)
        self.optimiser = FlatAdam(learnt, learning_rate=settings.learning_rate)
        self.updates = 0

    @torch.no_grad()
    def greedy(self, observation: Tensor) -> Tensor:
        """The policy's means [B, A]."""
        return self.policy(observation)

    @torch.no_grad()
    def drawn(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """Actions [B, A] drawn from the policy, at most 1 in size."""
        mean = self.policy(observation)
        spread = self.policy.log_std.clamp(*LOG_STD).exp()
        return (mean + spread * torch.randn(mean.shape, generator=generator)).clamp(-1.0, 1.0)

    def loss(self, batch: Transitions) -> Tensor:
        """Sum of the policy's and, for IQL, the values' losses. Each part's gradient reaches its own network only."""
        log_density = self.policy.log_density(batch.observation, batch.action)
        if not self.values:
            return -log_density.mean()
        settings, taken = self.settings, torch.cat([batch.observation, batch.action], -1)
        value = self.value(batch.observation)[0, :, 0]
        with torch.no_grad():
            q = self.slow_critics(taken)[..., 0].amin(0)
            after = self.value(batch.following)[0, :, 0]
            target = batch.reward + settings.gamma * (1.0 - batch.terminated) * after
            weight = (settings.inverse_temperature * (q - value)).exp().clamp(max=settings.most_weight)
        critics = (self.critics(taken)[..., 0] - target).square().mean(1).sum()
        return critics + expectile_loss(q - value, settings.expectile).mean() - (weight * log_density).mean()

    def update(self, batch: Transitions, generator: torch.Generator) -> None:
        """One step on the batch."""
        self.optimiser.descend(self.loss(batch))
        self.updates += 1
        if self.values:
            follow(self.slow_critics, self.critics, self.settings.target_rate)
