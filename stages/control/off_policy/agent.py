"""Soft actor-critic with an ensemble of critics, scalar (SAC) or of distributions (DSAC-T)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from stages.control.off_policy import dsac_t
from stages.control.off_policy.networks import Ensemble, Policy
from stages.control.off_policy.settings import OffPolicy


@dataclass(frozen=True)
class Transitions:
    """B steps."""

    observation: Tensor
    """[B, S]."""
    action: Tensor
    """[B, A], between -1 and 1."""
    reward: Tensor
    """[B]."""
    following: Tensor
    """[B, S]: the next observation."""
    terminated: Tensor
    """[B]: 1.0 where no reward can follow; 0.0 where only the time was up."""

    def at(self, rows: Tensor) -> Transitions:
        return Transitions(*(getattr(self, field.name)[rows] for field in fields(self)))


class Agent(nn.Module):
    """Policy, critics and their slow copies; `update` learns from one batch."""

    running: Tensor

    def __init__(self, settings: OffPolicy, observations: int, actions: int) -> None:
        super().__init__()
        self.settings, self.entropy = settings, -float(actions)
        self.policy = Policy(observations, actions, settings.width, settings.layers)
        outputs = 2 if settings.critic == "gaussian" else 1
        self.critics = Ensemble(settings.critics, observations + actions, settings.width, settings.layers, outputs)
        self.log_alpha = nn.Parameter(torch.tensor(settings.alpha).log())
        self.register_buffer("running", torch.full((settings.critics,), float("nan")))
        learnt = list(self.parameters())
        self.slow_policy, self.slow_critics = copy.deepcopy(self.policy), copy.deepcopy(self.critics)
        self.optimiser = torch.optim.Adam(learnt, lr=settings.learning_rate, fused=True)
        self.updates = 0

    def values(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q of the most pessimistic critic, [B]."""
        return self._means(self.critics(torch.cat([observation, action], -1))).amin(0)

    def _means(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0]

    def critic_loss(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """Sum over critics of half the mean squared error (scalar), or DSAC-T's loss, against soft targets."""
        settings = self.settings
        outputs = self.critics(torch.cat([batch.observation, batch.action], -1))
        with torch.no_grad():
            policy = self.slow_policy if settings.target_policy else self.policy
            action, log_density = policy.sample(batch.following, generator)
            after = self.slow_critics(torch.cat([batch.following, action], -1))
            entropy = self.log_alpha.exp() * log_density
            discount = settings.gamma * (1.0 - batch.terminated)
        if settings.critic == "scalar":
            target = batch.reward + discount * (self._means(after).amin(0) - entropy)
            return 0.5 * ((self._means(outputs) - target) ** 2).mean(1).sum()
        mean, std = dsac_t.distribution(outputs)
        with torch.no_grad():
            next_mean, next_std = dsac_t.distribution(after)
            chosen = dsac_t.most_pessimistic(next_mean, dsac_t.sample(next_mean, next_std, generator))
            expected, sampled = (batch.reward + discount * (value - entropy) for value in chosen)
            self.running.copy_(dsac_t.running_spread(self.running, std, settings.gaussian.spread_rate))
        return dsac_t.critic_loss(mean, std, expected, sampled, self.running, settings.gaussian)

    def policy_loss(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """Mean of alpha log pi - min Q over new actions, plus alpha's own loss. No gradient reaches the critics."""
        action, log_density = self.policy.sample(batch.observation, generator)
        values = self._means(self.critics(torch.cat([batch.observation, action], -1), frozen=True)).amin(0)
        loss = (self.log_alpha.exp().detach() * log_density - values).mean()
        if self.settings.tune_alpha:
            loss = loss - self.log_alpha * (log_density.detach() + self.entropy).mean()
        return loss

    def update(self, batch: Transitions, generator: torch.Generator) -> None:
        """One step of the critics; on every `delay`-th call, the first included, also of the policy, alpha and the slow copies.
        All gradients are taken before any step."""
        with_policy = self.updates % self.settings.delay == 0
        loss = self.critic_loss(batch, generator)
        if with_policy:
            loss = loss + self.policy_loss(batch, generator)
        if self.settings.diversity:
            loss = loss + self.settings.diversity * similarity(self._action_gradients(batch))
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        self.updates += 1
        if with_policy:
            self._follow()

    def _action_gradients(self, batch: Transitions) -> Tensor:
        """Of every critic's Q by the batch's actions, [N, B, A], with their own graph."""
        count = self.settings.critics
        action = batch.action.expand(count, -1, -1).clone().requires_grad_()
        values = self._means(self.critics(torch.cat([batch.observation.expand(count, -1, -1), action], -1)))
        return torch.autograd.grad(values.sum(), action, create_graph=True)[0]

    @torch.no_grad()
    def _follow(self) -> None:
        pairs: list[tuple[nn.Module, nn.Module]] = [(self.slow_critics, self.critics)]
        if self.settings.target_policy:
            pairs.append((self.slow_policy, self.policy))
        for slow, fast in pairs:
            torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), self.settings.target_rate)


def similarity(gradients: Tensor) -> Tensor:
    """Mean over the batch of the sum of cosines between all ordered pairs of critics' gradients [N, B, A], divided by N - 1: N if
    all are equal, 0 if they are orthogonal. EDAC (An et al., arXiv 2110.01548) and RAVL keep it low."""
    count = len(gradients)
    units = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
    return ((units.sum(0) ** 2).sum(-1) - count).mean() / (count - 1)
