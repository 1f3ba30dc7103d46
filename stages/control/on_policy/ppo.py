"""Proximal policy optimisation: policy and value network, generalised advantages, the clipped loss.

After Schulman et al., arXiv 1707.06347 and 1506.02438:
L = -mean min(r A, clip(r, 1 - eps, 1 + eps) A) + c mean (V - R)^2 - h entropy, r the ratio of the action's new to its old
probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stages.control.columns import parts, side_by_side
from stages.control.off_policy.updates import FlatAdam
from stages.control.on_policy.settings import Ppo
from stages.values.ensemble import Ensemble


@dataclass(frozen=True)
class Steps:
    """B steps of the policy that collected them."""

    observation: Tensor
    """[B, S]."""
    action: Tensor
    """[B, A], or numbers of actions [B, 1]."""
    log_density: Tensor
    """[B]: of the action, when it was drawn."""
    advantage: Tensor
    returns: Tensor
    """[B]: what the value network learns."""

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator[Steps]:
        """All steps in a random order, in batches of `size`."""
        columns = [getattr(self, field.name) for field in fields(self)]
        rows = side_by_side(columns)[torch.randperm(len(self.advantage), generator=generator)]
        widths = [column.shape[1] if column.dim() == 2 else None for column in columns]
        return (Steps(*parts(batch, widths)) for batch in rows.split(size))


class ActorCritic(nn.Module):
    """Policy and value network, each with its own hidden layers, which are evaluated together as batched products."""

    def __init__(self, settings: Ppo, observations: int, actions: int, discrete: bool) -> None:
        super().__init__()
        self.settings, self.discrete = settings, discrete
        self.trunk = Ensemble(2, observations, settings.width, settings.layers - 1, settings.width, settings.activation)
        self.policy, self.value = nn.Linear(settings.width, actions), nn.Linear(settings.width, 1)
        self.log_std = None if discrete else nn.Parameter(torch.zeros(actions))
        for weight, bias in zip(self.trunk.weights, self.trunk.biases, strict=True):
            for member in weight:
                nn.init.orthogonal_(member, math.sqrt(2.0))
            nn.init.zeros_(bias)
        for head, gain in ((self.policy, 0.01), (self.value, 1.0)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)
        self.optimiser = FlatAdam(
            self.parameters(), learning_rate=settings.learning_rate, epsilon=1e-5, largest_norm=settings.gradient_norm
        )
        self.updates = 0

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of all actions, or means [B, A], and values [B]."""
        policy, value = self.trunk.activation(self.trunk(observation)).unbind()
        found = self.policy(policy)
        return (torch.log_softmax(found, -1) if self.discrete else found), self.value(value).squeeze(1)

    def log_densities(self, found: Tensor, action: Tensor) -> Tensor:
        """Of the actions, [B], from the policy's outputs [B, A]."""
        if self.log_std is None:
            return found.gather(1, action.long()).squeeze(1)
        scaled = (action - found) * (-self.log_std).exp()
        return (-0.5 * scaled**2 - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, found: Tensor) -> Tensor:
        """The policy's mean entropy over the batch, from its outputs [B, A]."""
        if self.log_std is None:
            return -(found.exp() * found).sum(-1).mean()
        return (self.log_std + 0.5 * math.log(2 * math.pi) + 0.5).sum()

    @torch.no_grad()
    def act(self, observation: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Actions drawn from the policy, their log-densities [B], and the values [B]."""
        found, value = self(observation)
        if self.log_std is None:
            action = torch.multinomial(found.exp(), 1, generator=generator).float()
        else:
            action = found + self.log_std.exp() * torch.randn(found.shape, generator=generator)
        return action, self.log_densities(found, action), value

    @torch.no_grad()
    def greedy(self, observation: Tensor) -> Tensor:
        """The most probable actions."""
        found = self(observation)[0]
        return found.argmax(-1, keepdim=True).float() if self.discrete else found

    def loss(self, batch: Steps) -> Tensor:
        """Of one batch; see the module."""
        settings = self.settings
        found, value = self(batch.observation)
        advantage = batch.advantage
        if settings.normalise:
            std, mean = torch.std_mean(advantage)
            advantage = (advantage - mean) / (std + 1e-8)
        ratio = (self.log_densities(found, batch.action) - batch.log_density).exp()
        clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
        gained = torch.minimum(ratio * advantage, clipped * advantage).mean()
        loss = settings.value_weight * mse_loss(value, batch.returns) - gained
        return loss - settings.entropy * self.entropy(found) if settings.entropy else loss

    def update(self, batch: Steps) -> None:
        """One step on the batch."""
        self.optimiser.descend(self.loss(batch))
        self.updates += 1


def advantages(reward: Tensor, value: Tensor, after: Tensor, ended: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantages [T, N]: sum_k (gamma lam)^k (r + gamma V' - V) until the episode ends.

    after [T, N]: V', 0 where the task was over; ended [T, N]: 1.0 where an episode ended, for either reason."""
    surprise = reward + gamma * after - value
    found = surprise.clone()
    for place in range(len(found) - 2, -1, -1):
        found[place] += gamma * lam * (1.0 - ended[place]) * found[place + 1]
    return found
