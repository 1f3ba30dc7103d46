"""Deep Q-learning (DQN) with any scalar head: squared or Huber error, two-hot, HL-Gauss, C51.

After Mnih et al. (Nature 518, 2015) and, for `double`, van Hasselt et al. (arXiv 1509.06461): y = r + gamma max_a Q'(s', a), with
a target network Q'.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from stages.control.off_policy.dqn_settings import DeepQ
from stages.control.off_policy.updates import FlatAdam
from stages.values.ensemble import Ensemble
from stages.values.heads import C51Head, make_head

if TYPE_CHECKING:
    from stages.control.off_policy.replay import Replay, Transitions


class Dqn(nn.Module):
    """A Q-network and its target network; `update` learns from one batch."""

    def __init__(self, settings: DeepQ, observations: int, actions: int) -> None:
        super().__init__()
        self.settings, self.actions, self.head = settings, actions, make_head(settings.head)
        sizes = (1, observations, settings.width, settings.layers, actions * self.head.outputs)
        self.network = Ensemble(*sizes, settings.activation)
        self.target = copy.deepcopy(self.network)
        self.optimiser = FlatAdam(
            self.network.parameters(), learning_rate=settings.learning_rate, largest_norm=settings.gradient_norm
        )
        self.updates = 0

    def _logits(self, network: Ensemble, observation: Tensor) -> Tensor:
        """[B, A, outputs]."""
        return network(observation).squeeze(0).unflatten(-1, (self.actions, self.head.outputs))

    def _of(self, action: Tensor, logits: Tensor) -> Tensor:
        """[B, outputs] of actions [B, 1] among logits [B, A, outputs]."""
        return logits.gather(1, action[..., None].expand(-1, 1, self.head.outputs)).squeeze(1)

    def values(self, observation: Tensor) -> Tensor:
        """Q [B, A]."""
        return self.head.decode(self._logits(self.network, observation))

    @torch.no_grad()
    def greedy(self, observation: Tensor) -> Tensor:
        """Numbers of the best actions, [B, 1]."""
        return self.values(observation).argmax(-1, keepdim=True).float()

    def exploration(self, steps: int) -> float:
        """Probability of a random action after so many steps."""
        least = self.settings.least_exploration
        share = steps / (self.settings.exploration * self.settings.steps)
        return max(least, 1.0 - (1.0 - least) * share)

    def act(self, observation: Tensor, steps: int, generator: torch.Generator) -> Tensor:
        """Actions [B, 1]: random ones with probability `exploration`, else the best."""
        count = len(observation)
        explores = torch.rand(count, 1, generator=generator) < self.exploration(steps)
        drawn = torch.randint(self.actions, (count, 1), generator=generator).float()
        return drawn if bool(explores.all()) else torch.where(explores, drawn, self.greedy(observation))

    def stepped(self, replay: Replay, steps: int) -> int:
        """Copy the weights to the target network if that is due; how many updates are."""
        if not steps % self.settings.target_every:
            self.target.load_state_dict(self.network.state_dict())
        return 0 if steps % self.settings.update_every else self.settings.updates

    def loss(self, batch: Transitions) -> Tensor:
        """Mean over the batch of the head's loss."""
        taken = self._of(batch.action.long(), self._logits(self.network, batch.observation))
        with torch.no_grad():
            after = self._logits(self.target, batch.following)
            ahead = self.head.decode(after)
            choice = (self.values(batch.following) if self.settings.double else ahead).argmax(-1, keepdim=True)
            discount = self.settings.gamma * (1.0 - batch.terminated)
            if isinstance(self.head, C51Head):
                distribution = self.head.project(torch.softmax(self._of(choice, after), -1), batch.reward, discount)
            else:
                target = torch.addcmul(batch.reward, discount, ahead.gather(1, choice).squeeze(1))
        if isinstance(self.head, C51Head):
            return self.head.distribution_loss(taken, distribution).mean()
        if self.settings.head.loss == "mse" and self.settings.huber is not None:
            return huber_loss(taken.squeeze(1), target, delta=self.settings.huber)
        return self.head.loss(taken, target).mean()

    def update(self, batch: Transitions, generator: torch.Generator) -> None:
        """One step on the batch."""
        self.optimiser.descend(self.loss(batch))
        self.updates += 1
