"""Ensembles of critics as RAVL and EDAC have them: targets, losses and the weight of diversity by hand, one critic as SAC's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.updates import FlatAdam, follow
from stages.values.ensemble import Ensemble

TINY_ALPHA = 1e-30
"""The entropy then counts for nothing."""


def agent_of(actions: int = 1, **values: object) -> Agent:
    torch.manual_seed(0)
    return Agent(OffPolicy.model_validate({"width": 8, **values}), 1, actions)


def row(observation: list[float], reward: float = 0.0, terminated: float = 1.0, actions: int = 1) -> Transitions:
    """One transition for each observation."""
    count = len(observation)
    seen = torch.tensor(observation)[:, None]
    ends = torch.full((count,), reward), seen, torch.full((count,), terminated)
    return Transitions(seen, torch.zeros(count, actions), *ends)


@torch.no_grad()
def constant(critics: Ensemble, values: list[float]) -> None:
    """Make each member's value a constant."""
    critics.weights[-1].zero_()
    critics.biases[-1].copy_(torch.tensor(values)[:, None, None])


@torch.no_grad()
def linear(critics: Ensemble, slopes: list[list[float]]) -> None:
    """Make each member's value the product of the inputs with its slopes, where all inputs times their sign are at least -9."""
    for weight, bias in zip(critics.weights, critics.biases, strict=True):
        weight.zero_()
        bias.zero_()
    critics.biases[0].fill_(9.0)
    for member, slope in enumerate(slopes):
        for place, value in enumerate(slope):
            critics.weights[0][member, place, place] = 1.0
            critics.weights[1][member, place, 0] = value
        critics.biases[1][member] = -9.0 * sum(slope)


@pytest.mark.parametrize(("terminated", "target"), [(0.0, 1.49), (1.0, 0.5)])
def test_the_target_is_the_most_pessimistic_members(terminated: float, target: float) -> None:
    """r = 0.5 and gamma 0.99: 0.5 + 0.99 * min(1, 3, 2), and 0.5 alone at the end. A critic at 0 then loses half its square."""
    agent = agent_of(critics=3, gamma=0.99, alpha=TINY_ALPHA)
    constant(agent.critics, [0.0, 0.0, 0.0])
    constant(agent.slow_critics, [1.0, 3.0, 2.0])
    loss = agent.critic_loss(row([0.3], 0.5, terminated), torch.Generator())
    assert loss.item() == pytest.approx(3 * 0.5 * target**2)


def test_the_critics_loss_is_half_of_ravls() -> None:
    """Q = [[1, 2], [0, 0]] and targets 0: RAVL's mean over the batch and sum over critics is 2.5."""
    agent = agent_of(critics=2, layers=1)
    linear(agent.critics, [[1.0, 0.0], [0.0, 0.0]])
    data = row([1.0, 2.0])
    assert agent.critics(torch.cat([data.observation, data.action], 1))[..., 0].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert agent.critic_loss(data, torch.Generator()).item() == pytest.approx(2.5 / 2)


@pytest.mark.parametrize(
    ("slopes", "similarity"),
    [([[0.0, 1.0, 0.0]] * 3, 3.0), ([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]], 0.0), ([[0.0, 3.0, 4.0], [0.0, -6.0, -8.0]], -2.0)],
)
def test_diversity_counts_half_beside_half_the_squared_errors(slopes: list[list[float]], similarity: float) -> None:
    """Contract: `diversity` is eta of EDAC and RAVL, whose squared errors have no factor 1/2."""
    agent = agent_of(2, critics=len(slopes), layers=1, diversity=0.4)
    linear(agent.critics, slopes)
    assert agent.diversity_loss(row([0.5, -0.5], actions=2)).item() == pytest.approx(0.5 * 0.4 * similarity, abs=1e-6)


def gradient(agent: Agent, loss: Tensor) -> Tensor:
    """Of a loss by the critics' weights, side by side."""
    found = torch.autograd.grad(loss, list(agent.critics.parameters()), allow_unused=True)
    pairs = zip(agent.critics.parameters(), found, strict=True)
    return torch.cat([(torch.zeros_like(one) if part is None else part).flatten() for one, part in pairs])


def test_an_update_descends_half_of_edacs_loss() -> None:
    """After Adam's first step the mean of gradients is a tenth of the gradient."""
    agent = agent_of(2, critics=3, diversity=0.7)
    data = Transitions(*(torch.rand(4, *shape) for shape in ((1,), (2,), (), (1,), ())))
    action, log_density = agent.policy.sample(data.following, torch.Generator().manual_seed(3))
    after = agent.slow_critics(torch.cat([data.following, action], 1))[..., 0].min(0).values
    target = data.reward + 0.99 * (1 - data.terminated) * (after - log_density)
    values = agent.critics(torch.cat([data.observation, data.action], 1))[..., 0]
    at = data.action.expand(3, -1, -1).clone().requires_grad_()
    seen = data.observation.expand(3, -1, -1)
    (slopes,) = torch.autograd.grad(agent.critics(torch.cat([seen, at], -1)).sum(), at, create_graph=True)
    units = torch.nn.functional.normalize(slopes, dim=-1)
    cosines = torch.einsum("iba,jba->ijb", units, units)
    similarity = (cosines.sum((0, 1)) - 3).mean() / 2
    edac = (values - target.detach()).square().mean(1).sum() + 0.7 * similarity
    expected = gradient(agent, edac) / 2
    agent.update(data, torch.Generator().manual_seed(3))
    torch.testing.assert_close(agent.optimiser.moments[0][0] * 10, expected, atol=1e-6, rtol=1e-4)


def test_one_critic_is_single_critic_sac_to_the_bit() -> None:
    """Contract: with one member and no diversity, an update is that of soft actor-critic with a single critic, written here
    without an ensemble's minimum."""
    agent, other = agent_of(critics=1), agent_of(critics=1)
    data = Transitions(*(torch.rand(8, *shape) for shape in ((1,), (1,), (), (1,), ())))
    optimiser = FlatAdam(other.critics.parameters(), [*other.policy.parameters(), other.log_alpha], learning_rate=1e-3)
    for number in range(3):
        agent.update(data, torch.Generator().manual_seed(number))
        draws = torch.Generator().manual_seed(number)
        with torch.no_grad():
            following, density = other.policy.sample(data.following, draws)
            after = other.slow_critics(torch.cat([data.following, following], -1))[0, :, 0]
            target = data.reward + 0.99 * (1.0 - data.terminated) * (after - other.log_alpha.exp() * density)
        value = other.critics(torch.cat([data.observation, data.action], -1))[0, :, 0]
        critic = torch.nn.functional.mse_loss(value, target, reduction="sum") * (0.5 / 8)
        action, density = other.policy.sample(data.observation, draws)
        worth = other.critics(torch.cat([data.observation, action], -1), frozen=True)[0, :, 0]
        policy = (other.log_alpha.detach().exp() * density - worth).mean()
        alpha = -other.log_alpha * (density.detach() - 1.0).mean()
        optimiser.descend(critic + (policy + alpha))
        follow(other.slow_critics, other.critics, 0.005)
    assert len(agent.critics.weights[0]) == 1
    for one, same in zip(agent.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
