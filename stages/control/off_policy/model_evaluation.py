"""How fast the critics' values change, and how much a world model's errors matter to them, on new episodes."""

from __future__ import annotations

import numpy as np
import torch

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.evaluation import first_episodes
from stages.control.off_policy.imagination import Imagination
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.vector_task import VectorTask
from stages.seeding import key64
from stages.values.lipschitz import value_gap
from stages.values.vagram import state_loss


def model_figures(agent: Agent, imagination: Imagination | None, settings: OffPolicy) -> dict[str, float]:
    """lipschitz, lipschitz_most: 95 % quantile and maximum of the critics' slopes, per standard deviation of the states;
    lipschitz_bound: largest product of a critic's layer norms; with `unit_features` no bound, and left out. Of a world model:
    model_error, the mean squared error of its elites' means in standard deviations of the changes of state; value_error, the same
    as VaGraM weighs it; model_distance, the mean Wasserstein distance of its predictions, drawn as in rollouts, from the true
    next state; bellman_gap, what they move the target by. Ends of the task have no value."""
    generator = torch.Generator().manual_seed(key64(settings.seed, "off_policy", "model figures") % 2**63)
    data = new_transitions(agent, settings, generator)
    slopes = agent.slopes(data)
    found = {
        "lipschitz": float(slopes.quantile(0.95)),
        "lipschitz_most": float(slopes.max()),
    }
    if not settings.unit_features:
        found["lipschitz_bound"] = float(agent.critics.norms().prod(1).max())
    if imagination is None:
        return found
    model = imagination.model
    predicted = model.predictions(data.observation, data.action, generator)[0]
    errors = (model.means(data.observation, data.action) - data.following) / model.output_std[:-1]
    goes_on = 1.0 - data.terminated
    gradients = agent.value_gradients(data.following, "all") * model.output_std[:-1] * goes_on[:, None]
    gap = value_gap(agent.state_values, data.following.expand_as(predicted), predicted, settings.gamma)
    return {
        **found,
        "model_error": float(state_loss("mse", errors, None).mean()),
        "value_error": float(state_loss("vagram", errors, gradients[:, None]).mean()),
        "model_distance": float((predicted - data.following).norm(dim=-1).mean()),
        "bellman_gap": float((gap * goes_on).mean()),
    }


def new_transitions(agent: Agent, settings: OffPolicy, generator: torch.Generator) -> Transitions:
    """One episode of each of `evaluate_episodes` environments, played by the policy as it learns."""
    task = VectorTask(settings.task, settings.evaluate_episodes, distractors=settings.distractors)
    observation = task.reset(first_episodes(settings, "model figures"))
    going, parts = np.ones(len(observation), dtype=bool), []
    while going.any():
        seen = torch.from_numpy(observation)
        with torch.no_grad():
            action = agent.policy.sample(seen, generator)[0]
        outcome = task.step(action.numpy())
        reward = torch.from_numpy(outcome.reward) * settings.reward_scale
        terminated = torch.from_numpy(outcome.terminated).float()
        step = Transitions(seen, action, reward, torch.from_numpy(outcome.following), terminated)
        parts.append(step.at(torch.from_numpy(np.flatnonzero(going))))
        going &= ~outcome.ended
        observation = outcome.observation
    return Transitions.joined(parts)
