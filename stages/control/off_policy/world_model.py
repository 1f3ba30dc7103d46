"""An ensemble of models of the next state and the reward, deterministic or Gaussian."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from stages.control.off_policy.model_settings import Dynamics
from stages.control.off_policy.replay import Transitions
from stages.values.ensemble import Ensemble
from stages.values.vagram import gaussian_loss, state_loss

SPREAD_BOUNDS = 0.01
"""Weight of the learnt bounds of the log standard deviation, which keeps them close."""
LOG_STD = (-5.0, 0.25)
"""What these bounds begin with: half of the log variance's -10 and 0.5 in MBPO."""


class WorldModel(nn.Module):
    """Predicts changes of state and rewards in standard deviations of the data."""

    input_mean: Tensor
    input_std: Tensor
    output_std: Tensor
    elites: Tensor

    def __init__(self, settings: Dynamics, observations: int, actions: int) -> None:
        super().__init__()
        self.settings, self.observations = settings, observations
        self.gaussian = settings.kind == "probabilistic"
        outputs = (observations + 1) * (2 if self.gaussian else 1)
        sizes = (settings.members, observations + actions, settings.width, settings.layers, outputs)
        self.network = Ensemble(*sizes, "silu")
        lowest, highest = (nn.Parameter(torch.full((observations + 1,), bound)) for bound in LOG_STD)
        self.highest, self.lowest = highest, lowest
        self.register_buffer("input_mean", torch.zeros(observations + actions))
        self.register_buffer("input_std", torch.ones(observations + actions))
        self.register_buffer("output_std", torch.ones(observations + 1))
        self.register_buffer("elites", torch.arange(settings.elites))

    @torch.no_grad()
    def measure(self, data: Transitions) -> None:
        """Take means and standard deviations from the data."""
        inputs, outputs = torch.cat([data.observation, data.action], -1), self._outputs(data)
        self.input_mean.copy_(inputs.mean(0))
        self.input_std.copy_(_positive(inputs.std(0, correction=0)))
        self.output_std.copy_(_positive(outputs.std(0, correction=0)))

    def _outputs(self, data: Transitions) -> Tensor:
        """Changes of state and rewards [..., S + 1], in their own units."""
        return torch.cat([data.following - data.observation, data.reward[..., None]], -1)

    def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and log standard deviation (None: deterministic) of the outputs in standard deviations of the data, [M, B, S + 1],
        of states [B, S] or of each member's own [M, B, S]."""
        inputs = (torch.cat([observation, action], -1) - self.input_mean) / self.input_std
        found = self.network(inputs)
        if not self.gaussian:
            return found, None
        mean, log_std = found.chunk(2, -1)
        log_std = self.highest - softplus(self.highest - log_std)
        return mean, self.lowest + softplus(log_std - self.lowest)

    def loss(self, data: Transitions, weights: Tensor | None, plain: bool) -> Tensor:
        """Mean over the batch for each member, [M]. data: [M, B, ...]; weights: `vagram.weights_of`, [K, M, B, S], for losses
        that use them; plain: add the squared error of the states."""
        mean, log_std = self(data.observation, data.action)
        errors = mean - self._outputs(data) / self.output_std
        if log_std is not None:
            return gaussian_loss(errors, log_std).mean(1) + SPREAD_BOUNDS * (self.highest - self.lowest).sum()
        if weights is None:
            return errors.square().mean((1, 2))
        found = state_loss(self.settings.loss, errors[..., :-1], weights) + errors[..., -1].square()
        return (found + errors[..., :-1].square().mean(-1) if plain else found).mean(1)

    @torch.no_grad()
    def means(self, observation: Tensor, action: Tensor) -> Tensor:
        """Mean next states [E, B, S] of every elite, without the spread of a Gaussian and without `output_noise`."""
        return observation + (self(observation, action)[0][self.elites] * self.output_std)[..., :-1]

    @torch.no_grad()
    def predictions(self, observation: Tensor, action: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Next states [E, B, S] and rewards [E, B] of every elite, drawn if the model is a Gaussian."""
        mean, log_std = self(observation, action)
        if log_std is not None:
            mean = mean + log_std.exp() * torch.randn(mean.shape, generator=generator)
        outputs = mean[self.elites] * self.output_std
        following = observation + outputs[..., :-1]
        if self.settings.output_noise:
            unit = self.settings.output_noise * self.input_std[: self.observations]
            following = following + unit * torch.randn(following.shape, generator=generator)
        return following, outputs[..., -1]

    @torch.no_grad()
    def uncertainty(self, observation: Tensor, action: Tensor) -> Tensor:
        """Of a Gaussian, [B]: the largest Euclidean length over all members of the standard deviations of next state and reward,
        in their own units, as MOPO's code has it."""
        log_std = self(observation, action)[1]
        assert log_std is not None
        return (log_std.exp() * self.output_std).norm(dim=-1).amax(0)

    def step(self, observation: Tensor, action: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Next states [B, S] and rewards [B], each by a random elite; rewards less the penalty, if there is one."""
        following, reward = self.predictions(observation, action, generator)
        chosen = torch.randint(len(self.elites), (len(observation),), generator=generator)
        rows = torch.arange(len(observation))
        following, reward = following[chosen, rows], reward[chosen, rows]
        if self.settings.penalty == "mopo":
            reward = reward - self.settings.penalty_weight * self.uncertainty(observation, action)
        return following, reward


def _positive(spread: Tensor) -> Tensor:
    """Units of dimensions that do not vary are 1."""
    return torch.where(spread > 1e-8, spread, torch.ones_like(spread))
