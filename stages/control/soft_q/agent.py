"""ARSQ as an agent of the off-policy loop: soft Q-learning over discretised actions, with a term for demonstrations."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.updates import FlatAdam, follow
from stages.control.soft_q.arsq import SoftQ, demo_term, encode, reduced
from stages.control.soft_q.settings import Discretised, SoftQLearning


def optimiser_of(model: SoftQ, learning_rate: float, settings: Discretised) -> FlatAdam:
    """Of both networks."""
    decay = settings.weight_decay
    return FlatAdam(model.parameters(), learning_rate=learning_rate, weight_decay=decay, decoupled=decay > 0)


class SoftQAgent(nn.Module):
    """A pair of soft Q-networks and their slow copies; `update` learns from one batch, whose first rows are demonstrations."""

    def __init__(self, settings: SoftQLearning, observations: int, actions: int, demonstrated: int = 0) -> None:
        """demonstrated: rows of a batch that are demonstrations."""
        super().__init__()
        self.settings, self.demonstrated = settings, demonstrated
        self.model = SoftQ(observations, actions, settings)
        self.slow = copy.deepcopy(self.model)
        self.optimiser = optimiser_of(self.model, settings.learning_rate, settings)
        self.updates = 0

    @property
    def acting(self) -> SoftQ:
        """The networks whose policy is played."""
        return self.model if self.settings.act_network == "online" else self.slow

    def act(self, observation: Tensor, steps: int, generator: torch.Generator) -> Tensor:
        """Actions [B, A] drawn from the soft policy, whatever the number of steps."""
        return self.acting.act(observation, generator)

    def greedy(self, observation: Tensor) -> Tensor:
        """The best actions [B, A]."""
        return self.acting.act(observation)

    def stepped(self, replay: Replay, steps: int) -> int:
        """How many updates are due after a step of each environment."""
        return self.settings.updates_per_step * self.settings.environments

    @torch.no_grad()
    def target(self, batch: Transitions) -> Tensor:
        """y = r + gamma (1 - d) min_i V_i'(s'), [B]: no action is drawn."""
        after = self.slow.state_value(batch.following)[..., 0].amin(0)
        return batch.reward + self.settings.gamma * (1.0 - batch.terminated) * after

    def loss(self, batch: Transitions) -> Tensor:
        """Sum over both networks of the weighted mean squared error and the weighted term of the demonstrations."""
        settings = self.settings
        codes = encode(batch.action, settings.levels, settings.bins)
        values, advantages = self.model(batch.observation, codes)
        error = (values - self.target(batch)).square().mean(1)
        term = reduced(demo_term(advantages, codes, settings.demo), self.demonstrated, settings.demo.reduce)
        return (settings.bellman_weight * error + settings.demo.weight * term).sum()

    @torch.no_grad()
    def least_advantage(self, batch: Transitions) -> float:
        """Over both networks, all bins, and the positions of the batch's actions."""
        codes = encode(batch.action, self.settings.levels, self.settings.bins)
        return float(self.model.advantages(batch.observation, codes).min())

    def update(self, batch: Transitions, generator: torch.Generator) -> None:
        """One step on the batch."""
        self.optimiser.descend(self.loss(batch))
        self.updates += 1
        follow(self.slow, self.model, self.settings.target_rate)
