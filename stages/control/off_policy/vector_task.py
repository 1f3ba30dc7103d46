"""Copies of a Gymnasium task that are played side by side, with actions between -1 and 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.runtime.validation import ParamsError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Outcome:
    """What one step of N environments led to."""

    following: Floats
    """[N, S]: observations after the step, before a new episode begins."""
    reward: Floats
    terminated: NDArray[np.bool_]
    """[N]: the task is over; false where only the time is up."""
    ended: NDArray[np.bool_]
    """[N]: the episode is over, for either reason."""
    observation: Floats
    """[N, S]: what the next action is for; the first of a new episode where the last one ended."""


class VectorTask:
    """`count` copies of `task`, whose episodes last `more_steps` longer than the task says, with `distractors`."""

    def __init__(self, task: str, count: int, more_steps: int = 0, distractors: int = 0) -> None:
        """Raises ParamsError if the task can't be made or its spaces don't fit, ModuleNotFoundError without Gymnasium."""
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "off-policy learning needs Gymnasium; install it with pip install 'bellwether[gymnasium]'", name=error.name
            ) from error
        try:
            limit = gymnasium.spec(task).max_episode_steps
            if limit is None:
                raise ParamsError(f"task: the episodes of {task} have no time limit; register it with max_episode_steps")
            made: list[Any] = [gymnasium.make(task, max_episode_steps=limit + more_steps) for _ in range(count)]
        except gymnasium.error.DependencyNotInstalled as error:
            raise ParamsError(f"task: {task} needs a package that is not installed: {error}") from error
        except gymnasium.error.Error as error:
            raise ParamsError(f"task: Gymnasium has no {task}: {error}") from error
        same_step = gymnasium.vector.AutoresetMode.SAME_STEP
        _check_spaces(task, made[0])
        if distractors:
            from stages.control.off_policy.distractors import Distractors

            made = [Distractors(one, distractors) for one in made]
        self.environments = gymnasium.vector.SyncVectorEnv([lambda one=one: one for one in made], autoreset_mode=same_step)
        space = made[0].action_space
        self.low, self.high = space.low, space.high
        self.observations, self.actions = made[0].observation_space.shape[0], space.shape[0]

    def reset(self, seed: int) -> Floats:
        """Begin new episodes; their observations [N, S]. Later episodes' random numbers follow from `seed` too."""
        return self.environments.reset(seed=seed)[0].astype(np.float32)

    def step(self, action: Floats) -> Outcome:
        """Do actions [N, A] between -1 and 1."""
        scaled = self.low + (action.clip(-1.0, 1.0) + 1.0) * 0.5 * (self.high - self.low)
        observation, reward, terminated, truncated, info = self.environments.step(scaled)
        following = observation.astype(np.float32)
        ended = terminated | truncated
        for place in np.flatnonzero(ended):
            following[place] = info["final_obs"][place]
        return Outcome(following, reward.astype(np.float32), terminated, ended, observation.astype(np.float32))


def _check_spaces(task: str, made: Any) -> None:
    """Raise ParamsError if observations are not a vector, or actions not a bounded one."""
    seen, action = made.observation_space, made.action_space
    if type(seen).__name__ != "Box" or len(seen.shape) != 1:
        raise ParamsError(f"task: the observations of {task} are {seen}; off-policy learning needs a vector of numbers")
    if type(action).__name__ != "Box" or len(action.shape) != 1 or not action.is_bounded():
        raise ParamsError(f"task: the actions of {task} are {action}; SAC needs a vector of bounded numbers, as in Pendulum-v1")
