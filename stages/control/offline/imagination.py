"""Learning from a data set and a model's rollouts from its states, on which RAVL and its baselines are compared.

After Sims et al., arXiv 2402.12527: the model is fitted once, before the agent learns; it is rolled out from the data's states
every so many updates. `exact` puts the task's own dynamics in its place, so that no failure is the model's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.imagination import Imagination
from stages.control.off_policy.model_settings import Dynamics
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.vector_task import make_task
from stages.control.off_policy.world_model import WorldModel
from stages.control.offline.settings import OfflineDynamics
from stages.values.pessimism import disagreement

CELL = 0.25
"""Side of a cell, in standard deviations of the data's states: states of one cell count as one."""


class ExactPendulum(WorldModel):
    """The equations of Gymnasium's Pendulum-v1 in the place of a network."""

    def __init__(self, settings: Dynamics, observations: int, actions: int, reward_scale: float) -> None:
        super().__init__(settings, observations, actions)
        self.task, self.reward_scale = make_task("Pendulum-v1").unwrapped, reward_scale

    def _after(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Next states [B, 3] and rewards [B] of states [B, 3] (cosine, sine, speed) and actions [B, 1] between -1 and 1."""
        task = self.task
        angle, speed = torch.atan2(observation[:, 1], observation[:, 0]), observation[:, 2]
        torque = action[:, 0].clamp(-1.0, 1.0) * task.max_torque
        reward = -(angle.square() + 0.1 * speed.square() + 0.001 * torque.square())
        pull = 3.0 * task.g / (2.0 * task.l) * observation[:, 1] + 3.0 / (task.m * task.l**2) * torque
        speed = (speed + pull * task.dt).clamp(-task.max_speed, task.max_speed)
        angle = angle + speed * task.dt
        return torch.stack([angle.cos(), angle.sin(), speed], -1), reward * self.reward_scale

    @torch.no_grad()
    def means(self, observation: Tensor, action: Tensor) -> Tensor:
        return self._after(observation, action)[0][None]

    @torch.no_grad()
    def predictions(self, observation: Tensor, action: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        following, reward = self._after(observation, action)
        return following[None], reward[None]


class OfflineImagination(Imagination):
    """A model of a data set, and its rollouts from there."""

    settings: OfflineDynamics

    def __init__(self, settings: OffPolicy, observations: int, actions: int) -> None:
        super().__init__(settings, observations, actions)
        if self.settings.exact:
            self.model = ExactPendulum(self.settings, observations, actions, settings.reward_scale)

    def fit_model(self, real: Replay, agent: Agent, generator: torch.Generator) -> None:
        """At first alone; the exact model takes the units of its errors from the data, and is not fitted."""
        if self.settings.exact:
            self.model.measure(real.everything())
        elif not self.fits:
            super().fit_model(real, agent, generator)


def edge_figures(
    imagination: Imagination, real: Replay, agent: Agent, updates: int, generator: torch.Generator
) -> dict[str, float]:
    """edge_targets: share of the transitions learnt from whose next state is in a cell of which no state is updated;
    disagreement_ends, disagreement_inner: mean standard deviation over the critics, at the middle action, in states that rollouts
    end in because their length is up, and in those that they pass through; q_mean, q_most: mean and largest Q of the data."""
    data = real.everything()
    unit = data.observation.std(0, correction=0).clamp(min=1e-8) * CELL
    learnt_from = Transitions.joined([data, imagination.replay.everything()])
    rollouts = list(imagination.rollouts(real, agent, updates, generator))
    longest = imagination.settings.horizon.at(updates)
    ends = rollouts[-1].following[rollouts[-1].terminated == 0.0] if len(rollouts) == longest else data.observation[:0]
    inner = torch.cat([one.observation for one in rollouts])
    with torch.no_grad():
        values = agent.values(data.observation, data.action)
    return {
        "edge_targets": outside(learnt_from, unit),
        "disagreement_ends": spread(agent, ends),
        "disagreement_inner": spread(agent, inner),
        "q_mean": float(values.mean()),
        "q_most": float(values.max()),
    }


def outside(data: Transitions, unit: Tensor) -> float:
    """Share of the transitions that are not terminal whose next state is in a cell, of sides `unit` [S], that no state of any
    transition is in; 0 if all are terminal."""
    cells = torch.cat([data.observation, data.following]).div(unit).floor()
    number = torch.unique(cells, dim=0, return_inverse=True)[1]
    updated = torch.zeros(int(number.max()) + 1, dtype=torch.bool)
    updated[number[: len(data.reward)]] = True
    used = data.terminated == 0.0
    return float((~updated[number[len(data.reward) :]])[used].float().mean()) if used.any() else 0.0


@torch.no_grad()
def spread(agent: Agent, state: Tensor) -> float:
    """Mean standard deviation over critics of the middle actions' values in states [B, S]; 0 without states."""
    return float(disagreement(agent.all_values(state, agent.greedy(state))).mean()) if len(state) else 0.0
