"""One decision with a two-dimensional action, learnt offline: the best action's parts do badly with most others.

`python -m stages.control.soft_q.joint_actions --settings FILE --result FILE` learns once: a run of lane control with
`environment: joint_actions`. The reward depends on the signs of both parts (REWARDS), and the data seldom has the best pair
(SHARES). The best sum of one value per part, fitted to these data, is at another pair. With `rewards: ring` good actions are on a
ring (RING) instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.offline.agents import Clone
from stages.control.offline.settings import Offline
from stages.control.one_run import one_run
from stages.control.soft_q.agent import optimiser_of
from stages.control.soft_q.arsq import SoftQ, demo_term, encode, reduced
from stages.control.soft_q.settings import JointActions
from stages.runtime.command import command
from stages.seeding import key64, seed_torch

REWARDS = torch.tensor([[1.0, -1.0], [0.0, 0.2]])
"""By the first part's sign (negative, positive) and the second's."""
SHARES = torch.tensor([[0.1, 0.4], [0.25, 0.25]])
"""Of the data."""
RING = (0.5, 0.9)
"""Radii between which actions are good, with rewards: ring."""
DRAWS = 1000
"""Actions of the soft policy in its evaluation."""


def reward_of(action: Tensor, rewards: str = "signs") -> Tensor:
    """Expected rewards [B] of actions [B, 2]."""
    if rewards == "ring":
        radius = action.norm(dim=1)
        return torch.where((radius >= RING[0]) & (radius <= RING[1]), 1.0, -1.0)
    sign = (action > 0).long()
    return REWARDS[sign[:, 0], sign[:, 1]]


def dataset(settings: JointActions) -> tuple[Tensor, Tensor]:
    """Actions [N, 2] and noisy rewards [N]."""
    generator = _generator(settings, "data")
    if settings.rewards == "ring":
        return ring_data(settings, generator)
    pair = torch.multinomial(SHARES.flatten(), settings.data, replacement=True, generator=generator)
    sign = torch.stack([pair // 2, pair % 2], 1) * 2.0 - 1.0
    action = sign * (0.1 + 0.8 * torch.rand(settings.data, 2, generator=generator))
    noise = settings.noise * torch.randn(settings.data, generator=generator)
    return action, reward_of(action) + noise


def ring_data(settings: JointActions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of `rewards: ring`: one half on the ring, in all directions, the other anywhere."""
    count, half = settings.data, settings.data // 2
    angle, radius = 2.0 * math.pi * torch.rand(half, generator=generator), torch.rand(half, generator=generator)
    radius = RING[0] + (RING[1] - RING[0]) * radius
    on_it = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    action = torch.cat([on_it, 2.0 * torch.rand(count - half, 2, generator=generator) - 1.0])
    return action, reward_of(action, "ring") + settings.noise * torch.randn(count, generator=generator)


def learn(settings: JointActions) -> SoftQ:
    """Train both networks on batches of the dataset. There is one state, and rewards end the episode."""
    seed_torch(settings.seed, "joint_actions")
    model = SoftQ(1, 2, settings)
    action, reward = dataset(settings)
    codes, generator = encode(action, settings.levels, settings.bins), _generator(settings, "batches")
    optimiser = optimiser_of(model, settings.learning_rate, settings)
    state = torch.ones(settings.batch, 1)
    for _ in range(settings.updates):
        rows = torch.randint(settings.data, (settings.batch,), generator=generator)
        values, advantages = model(state, codes[rows])
        error = ((values - reward[rows]) ** 2).mean(1)
        term = reduced(demo_term(advantages, codes[rows], settings.demo), settings.batch, settings.demo.reduce)
        optimiser.descend((settings.bellman_weight * error + settings.demo.weight * term).sum())
    return model


def rival(settings: JointActions) -> Agent | Clone:
    """Soft actor-critic with the temperature `alpha`, or behaviour cloning, trained on as many batches of the dataset."""
    seed_torch(settings.seed, "joint_actions")
    shared = {name: getattr(settings, name) for name in ("width", "layers", "learning_rate")}
    agent: Agent | Clone
    if settings.learner == "sac":
        agent = Agent(OffPolicy(**shared, alpha=settings.alpha, tune_alpha=False), 1, 2)
    else:
        agent = Clone(Offline(**shared, method="bc"), 1, 2)
    action, reward = dataset(settings)
    generator, state, last = _generator(settings, "batches"), torch.ones(settings.batch, 1), torch.ones(settings.batch)
    for _ in range(settings.updates):
        rows = torch.randint(settings.data, (settings.batch,), generator=generator)
        agent.update(Transitions(state, action[rows], reward[rows], state, last), generator)
    return agent


def rival_figures(settings: JointActions) -> dict[str, float]:
    """greedy_reward and soft_reward as in `run`, of soft actor-critic also value_error."""
    agent = rival(settings)
    generator, many = _generator(settings, "actions"), torch.ones(DRAWS, 1)
    drawn = agent.policy.sample(many, generator)[0] if isinstance(agent, Agent) else agent.drawn(many, generator)
    greedy = agent.greedy(many[:1])
    found = {
        "greedy_reward": float(reward_of(greedy, settings.rewards)[0]),
        "soft_reward": float(reward_of(drawn, settings.rewards).mean()),
    }
    if isinstance(agent, Agent):
        action, _ = dataset(settings)
        with torch.no_grad():
            values = agent.critics(torch.cat([torch.ones(len(action), 1), action], 1))[..., 0].mean(0)
        found["value_error"] = float((values - reward_of(action, settings.rewards)).square().mean().sqrt())
    return found


def run(settings: JointActions) -> dict[str, float]:
    """Learn once. greedy_reward: expected reward of the greedy action; soft_reward: of the soft policy's; value_error: root mean
    squared error of Q over the data's actions; value: V; least_advantage: of any bin, after the data's choices. Rivals:
    `rival_figures`."""
    if settings.learner != "arsq":
        return rival_figures(settings)
    model = learn(settings)
    action, _ = dataset(settings)
    state = torch.ones(len(action), 1)
    with torch.no_grad():
        values, advantages = model(state, encode(action, settings.levels, settings.bins))
        error = (values.mean(0) - reward_of(action, settings.rewards)).square().mean().sqrt()
        value = model.state_value(state[:1]).mean()
    drawn = model.act(torch.ones(DRAWS, 1), _generator(settings, "actions"))
    return {
        "greedy_reward": float(reward_of(model.act(state[:1]), settings.rewards)[0]),
        "soft_reward": float(reward_of(drawn, settings.rewards).mean()),
        "value_error": float(error),
        "value": float(value),
        "least_advantage": float(advantages.min()),
    }


def _generator(settings: JointActions, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(key64(settings.seed, "joint_actions", name) % 2**63)


@command
def main() -> int:
    return one_run("control", __doc__, JointActions, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
