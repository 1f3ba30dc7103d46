"""Soft actor-critic with an ensemble of critics, scalar (SAC) or of distributions (DSAC-T)."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stages.control.off_policy.adversaries import lowest, penalty
from stages.control.off_policy.critics import BoundedCritics, UnitFeatures
from stages.control.off_policy.networks import Policy
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.updates import FlatAdam, follow
from stages.values import gaussian
from stages.values.ensemble import Ensemble
from stages.values.lipschitz import local_slopes
from stages.values.pessimism import aggregated, similarity

SCALE_EVERY = 1000
"""Updates between measurements of the states' standard deviations."""


class Agent(nn.Module):
    """Policy, critics and their slow copies; `update` learns from one batch."""

    running: Tensor
    square: Tensor
    """[N]: running mean of the spread's square, with `gaussian.scale_of: variance`."""
    scale: Tensor
    """[S]: standard deviations of the states in the replay buffer."""

    def __init__(self, settings: OffPolicy, observations: int, actions: int) -> None:
        super().__init__()
        self.settings = settings
        self.entropy = -float(actions) if settings.target_entropy is None else settings.target_entropy
        log_std = (settings.log_std_range[0], settings.log_std_range[1])
        body = (settings.width, settings.layers, settings.activation)
        self.policy = Policy(observations, actions, *body, log_std, settings.unit_features)
        self.critics = make_critics(settings, observations + actions)
        self.log_alpha = nn.Parameter(torch.tensor(settings.alpha).log())
        self.register_buffer("running", torch.full((settings.critics,), float("nan")))
        if settings.gaussian.scale_of == "variance":
            self.register_buffer("square", torch.full((settings.critics,), float("nan")))
        self.register_buffer("scale", torch.ones(observations))
        self.slow_policy, self.slow_critics = copy.deepcopy(self.policy), copy.deepcopy(self.critics)
        self.optimiser = self._optimiser()
        self.updates = 0

    def _optimiser(self) -> FlatAdam:
        """Alpha is in the policy's group unless it has a learning rate of its own."""
        settings = self.settings
        policy_rate = settings.policy_learning_rate or settings.learning_rate
        alpha_rate = settings.alpha_learning_rate or policy_rate
        critics, policy = list(self.critics.parameters()), list(self.policy.parameters())
        if alpha_rate == policy_rate:
            return FlatAdam(critics, [*policy, self.log_alpha], learning_rate=(settings.learning_rate, policy_rate))
        return FlatAdam(critics, policy, [self.log_alpha], learning_rate=(settings.learning_rate, policy_rate, alpha_rate))

    def values(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q of the ensemble, by default that of its most pessimistic critic, [B]."""
        return self._combined(self.critics(torch.cat([observation, action], -1)))

    def all_values(self, observation: Tensor, action: Tensor) -> Tensor:
        """Every critic's Q, [N, B]."""
        return self._means(self.critics(torch.cat([observation, action], -1)))

    def _combined(self, outputs: Tensor) -> Tensor:
        return aggregated(self._means(outputs), self.settings.aggregate)

    def _means(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs[..., 0]

    @torch.no_grad()
    def act(self, observation: Tensor, steps: int, generator: torch.Generator) -> Tensor:
        """Actions [B, A] drawn from the policy, whatever the number of steps."""
        return self.policy.sample(observation, generator)[0]

    def greedy(self, observation: Tensor) -> Tensor:
        """The policy's middle actions [B, A]."""
        return self.policy.greedy(observation)

    def stepped(self, replay: Replay, steps: int) -> int:
        """How many updates are due after a step of each environment; `steps`: of all together."""
        if steps % self.settings.update_every:
            return 0
        due = self.settings.updates_per_step * self.settings.environments
        if self.updates % SCALE_EVERY < due:
            self.scale.copy_(replay.everything().observation.std(0, correction=0))
        return due

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
            ahead = self._robust_values(batch.following, action, generator) if settings.lipschitz.robust_target else None
            target = batch.reward + discount * ((self._combined(after) if ahead is None else ahead) - entropy)
            means = self._means(outputs)
            return mse_loss(means, target.expand_as(means), reduction="sum") * (0.5 / len(target))
        mean, std = gaussian.distribution(outputs)
        with torch.no_grad():
            next_mean, next_std = gaussian.distribution(after)
            chosen = gaussian.most_pessimistic(next_mean, gaussian.sample(next_mean, next_std, generator))
            expected, sampled = (batch.reward + discount * (value - entropy) for value in chosen)
            self.running.copy_(gaussian.running_spread(self.running, std, settings.gaussian.spread_rate))
            square = self.square if settings.gaussian.scale_of == "variance" else None
            if square is not None:
                square.copy_(gaussian.running_spread(square, std.square(), settings.gaussian.spread_rate))
        return gaussian.critic_loss(mean, std, expected, sampled, self.running, settings.gaussian, square)

    def policy_loss(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """Mean of alpha log pi - Q of the ensemble over new actions, plus alpha's own loss. No gradient reaches the critics."""
        action, log_density = self.policy.sample(batch.observation, generator)
        values = self._combined(self.critics(torch.cat([batch.observation, action], -1), frozen=True))
        loss = (self.log_alpha.detach().exp() * log_density - values).mean()
        if self.settings.tune_alpha:
            loss = loss - self.log_alpha * (log_density.detach() + self.entropy).mean()
        return loss

    def update(self, batch: Transitions, generator: torch.Generator) -> None:
        """One step of the critics; on every `delay`-th call, the first included, also of the policy and alpha, and on every
        `target_every`-th of the slow copies. All gradients are taken before any step."""
        with_policy = self.updates % self.settings.delay == 0
        loss = self.critic_loss(batch, generator)
        if with_policy:
            loss = loss + self.policy_loss(batch, generator)
        if self.settings.lipschitz.kind == "robust":
            loss = loss + self.robust_loss(batch, generator)
        if self.settings.diversity:
            loss = loss + self.diversity_loss(batch)
        self.optimiser.descend(loss)
        self.critics.measure(self.settings.lipschitz.power_iterations)
        follows = self.updates % (self.settings.target_every or self.settings.delay) == 0
        self.updates += 1
        if follows:
            self._follow()
            self.slow_critics.measure(self.settings.lipschitz.power_iterations)

    def diversity_loss(self, batch: Transitions) -> Tensor:
        """Half the weighted similarity of the critics' gradients, as `critic_loss` is half of EDAC's and RAVL's loss."""
        return 0.5 * self.settings.diversity * similarity(self._action_gradients(batch))

    def robust_loss(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """The penalty on the critics' slopes by the batch's states; 0, without any draw, where it can't have an effect."""
        settings = self.settings.lipschitz
        if not settings.weight * settings.epsilon:
            return torch.zeros(())
        at = partial(self._values_at, self.critics, batch.action)
        return settings.weight * penalty(at, batch.observation, settings, self._unit, generator)

    @property
    def _unit(self) -> Tensor:
        """Of `lipschitz.epsilon`, [S]."""
        return self.scale if self.settings.lipschitz.units == "normalised" else torch.ones_like(self.scale)

    def _robust_values(self, state: Tensor, action: Tensor, generator: torch.Generator) -> Tensor | None:
        """The slow critics' smallest values [B] of actions [B, A] near states [B, S]; None, without any draw, if epsilon is 0."""
        if not self.settings.lipschitz.epsilon:
            return None

        def value(near: Tensor) -> Tensor:
            return self._combined(self.slow_critics(torch.cat([near, action], -1)))

        return lowest(value, state, self.settings.lipschitz, self._unit, generator)

    def _values_at(self, critics: Ensemble, action: Tensor, state: Tensor) -> Tensor:
        """Values [N, B] of actions [B, A] in states [1 or N, B, S]."""
        return self._means(critics(torch.cat([state, action.expand(len(state), -1, -1)], -1)))

    def slopes(self, batch: Transitions) -> Tensor:
        """How fast each critic's value changes with the state, per standard deviation of the states: [N, B]."""
        return local_slopes(partial(self._values_at, self.critics, batch.action), batch.observation, self.scale)

    @torch.no_grad()
    def state_values(self, state: Tensor) -> Tensor:
        """Values [...] of the middle actions in states [..., S], by the ensemble."""
        flat = state.flatten(0, -2)
        return self.values(flat, self.policy.greedy(flat)).unflatten(0, state.shape[:-1])

    def value_gradients(self, state: Tensor, heads: str) -> Tensor:
        """Gradients [K, B, S], by the state, of each critic's value of the middle action, which is held fixed. heads: all or
        target."""
        action, found = self.policy.greedy(state), []
        for critics in (self.critics, self.slow_critics) if heads == "all" else (self.slow_critics,):
            at = state.expand(self.settings.critics, -1, -1).clone().requires_grad_()
            found.append(torch.autograd.grad(self._values_at(critics, action, at).sum(), at)[0])
        return torch.cat(found)

    def _action_gradients(self, batch: Transitions) -> Tensor:
        """Of every critic's Q by the batch's actions, [N, B, A], with their own graph."""
        count = self.settings.critics
        action = batch.action.expand(count, -1, -1).clone().requires_grad_()
        values = self._means(self.critics(torch.cat([batch.observation.expand(count, -1, -1), action], -1)))
        return torch.autograd.grad(values.sum(), action, create_graph=True)[0]

    def _follow(self) -> None:
        pairs: list[tuple[nn.Module, nn.Module]] = [(self.slow_critics, self.critics)]
        if self.settings.target_policy:
            pairs.append((self.slow_policy, self.policy))
        for slow, fast in pairs:
            follow(slow, fast, self.settings.target_rate)


def make_critics(settings: OffPolicy, inputs: int) -> Ensemble:
    """Critics of `inputs` numbers, a state and an action."""
    outputs, lipschitz = 2 if settings.critic == "gaussian" else 1, settings.lipschitz
    sizes = (settings.critics, inputs, settings.width, settings.layers, outputs)
    if settings.unit_features:
        return UnitFeatures(*sizes, settings.activation)
    critics = BoundedCritics(*sizes, settings.activation, lipschitz.beta if lipschitz.kind == "spectral" else None)
    critics.free_last, critics.always = lipschitz.layers == "hidden", lipschitz.reciprocal == "always"
    return critics
