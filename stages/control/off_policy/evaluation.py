"""What a policy achieves, and by how much its critics over-estimate it."""

from __future__ import annotations

import math

import numpy as np
import torch

from stages.control.learnt import Act
from stages.control.off_policy.agent import Agent
from stages.control.off_policy.settings import Loop, OffPolicy
from stages.control.off_policy.vector_task import VectorTask
from stages.seeding import key64

TAIL = 0.01
"""Discount of the first reward that an estimate of the return leaves out."""


def first_episodes(settings: Loop, *key: object) -> int:
    """A seed of Gymnasium's, named by `key`."""
    return key64(settings.seed, "off_policy", *key) % 2**31


@torch.no_grad()
def mean_return(act: Act, task: VectorTask, seed: int) -> float:
    """Mean undiscounted return of a policy over one episode of each of the task's environments."""
    observation = task.reset(seed)
    going = np.ones(len(observation), dtype=bool)
    total = np.zeros(len(observation))
    while going.any():
        outcome = task.step(act(torch.from_numpy(observation)).numpy())
        total += np.where(going, outcome.reward, 0.0)
        going &= ~outcome.ended
        observation = outcome.observation
    return float(total.mean())


@torch.no_grad()
def overestimation(agent: Agent, settings: OffPolicy) -> float:
    """Mean difference between Q of the most pessimistic critic and the discounted return that follows, entropy included, along
    episodes of the policy as it learns: in units of reward times `reward_scale`.

    Episodes go on until what remains of the return is discounted to TAIL, so that the time limit does not cut it."""
    tail = math.ceil(math.log(TAIL) / math.log(settings.gamma))
    task = VectorTask(settings.task, settings.evaluate_episodes, more_steps=tail, distractors=settings.distractors)
    generator = torch.Generator().manual_seed(key64(settings.seed, "off_policy", "overestimation") % 2**63)
    observation = torch.from_numpy(task.reset(first_episodes(settings, "overestimation")))
    values, rewards, bonuses, real, last = [], [], [], [], []
    going = np.ones(len(observation), dtype=bool)
    while going.any():
        action, log_density = agent.policy.sample(observation, generator)
        values.append(agent.values(observation, action).numpy())
        bonuses.append(-float(agent.log_alpha.exp()) * log_density.numpy())
        outcome = task.step(action.numpy())
        rewards.append(outcome.reward * settings.reward_scale)
        real.append(going)
        last.append(outcome.ended & ~outcome.terminated)
        going = going & ~outcome.ended
        observation = torch.from_numpy(outcome.observation)
    returns = soft_returns(np.array(rewards), np.array(bonuses), np.array(real), settings.gamma)
    counted = np.array(real) & ~_near_the_end(np.array(last), tail)
    return float((np.array(values) - returns)[counted].mean())


def soft_returns(reward: np.ndarray, bonus: np.ndarray, real: np.ndarray, gamma: float) -> np.ndarray:
    """Discounted returns [T, N] from each step on; the entropy's bonus counts from the next step on, as in Q. real: not past the
    episode's end."""
    found = np.where(real, reward, 0.0)
    for place in range(len(found) - 2, -1, -1):
        found[place] += gamma * np.where(real[place + 1], bonus[place + 1] + found[place + 1], 0.0)
    return found


def _near_the_end(cut: np.ndarray, tail: int) -> np.ndarray:
    """[T, N]: whether one of the next `tail` steps is one of `cut`, where time was up."""
    near = cut.copy()
    for place in range(len(cut)):
        near[max(0, place - tail) : place] |= cut[place]
    return near
