"""PPO (Schulman et al., arXiv 1707.06347) of an agent whose inputs include an encoded guidance text."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from stages.control.advice.settings import Advice


@dataclass(frozen=True)
class Steps:
    """N steps as PPO reads them."""

    observation: Tensor
    guidance: Tensor
    """[N, G]: the encoded text under which the action was drawn."""
    action: Tensor
    logprob: Tensor
    advantage: Tensor
    target: Tensor
    """[N]: of the value."""

    def at(self, rows: Tensor) -> Steps:
        return Steps(*(getattr(self, field.name)[rows] for field in fields(self)))


class Player(nn.Module):
    """x = f(observation) + W E(g) + b; the action's distribution and the value share x. Without guidance x = f(observation)."""

    def __init__(self, settings: Advice, observations: int, actions: int) -> None:
        super().__init__()
        width = settings.width
        self.body = nn.Sequential(nn.Linear(observations, width), nn.Tanh())
        self.rest = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, actions), nn.Linear(width, 1)
        nn.init.normal_(self.policy.weight, std=0.01)
        # Last, so that the others' first weights are the same with guidance and without.
        self.guide = nn.Linear(settings.encoder, width) if settings.guidance != "none" else None

    def forward(self, observation: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, A] and values [N]."""
        hidden = self.body[0](observation)
        if self.guide is not None:
            hidden = hidden + self.guide(guidance)
        hidden = self.rest(self.body[1](hidden))
        return torch.log_softmax(self.policy(hidden), -1), self.value(hidden)[:, 0]


def advantages(reward: Tensor, value: Tensor, after: Tensor, over: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantages [T, E]. value [T, E]; after [T, E]: value of the state that followed, before a new episode began;
    over: an episode ended with this step. Episodes end by their time limit alone, so that `after` counts at their end, too."""
    found, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for step in reversed(range(len(reward))):
        delta = reward[step] + gamma * after[step] - value[step]
        running = delta + gamma * lam * torch.where(over[step], 0.0, running)
        found[step] = running
    return found


def losses(player: Player, batch: Steps, settings: Advice) -> tuple[Tensor, Tensor]:
    """The loss, and the ratios [N] of new and old probabilities."""
    logprobs, value = player(batch.observation, batch.guidance)
    ratio = (logprobs.gather(1, batch.action[:, None])[:, 0] - batch.logprob).exp()
    scaled = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
    clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
    entropy = -(logprobs.exp() * logprobs).sum(1).mean()
    loss = -torch.minimum(ratio * scaled, clipped * scaled).mean() - settings.entropy * entropy
    return loss + settings.value_coef * (value - batch.target).square().mean(), ratio.detach()


def update(player: Player, optimiser: torch.optim.Optimizer, data: Steps, settings: Advice, generator: torch.Generator) -> Tensor:
    """Epochs over the data in minibatches; returns the first minibatch's ratios, which are 1."""
    first: Tensor | None = None
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(data.action), generator=generator).split(settings.batch):
            if len(rows) < 2:
                continue  # no standard deviation
            loss, ratio = losses(player, data.at(rows), settings)
            first = ratio if first is None else first
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(player.parameters(), settings.max_grad_norm)
            optimiser.step()
    assert first is not None
    return first
