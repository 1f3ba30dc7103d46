"""Copies of a Gymnasium task that are played side by side, with actions between -1 and 1 or numbers of actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.runtime.validation import ParamsError

Floats = NDArray[np.float32]
Actions = Literal["continuous", "discrete", "either"]


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

    def __init__(
        self,
        task: str,
        count: int,
        more_steps: int = 0,
        distractors: int = 0,
        allowed: Actions = "continuous",
        **options: Any,
    ) -> None:
        """allowed: the kind of actions that the agent can take; `options` go to gymnasium.make. Raises ParamsError if the task
        can't be made or its spaces don't fit, ModuleNotFoundError without Gymnasium."""
        gymnasium = import_gymnasium()
        made = [make_task(task, more_steps, distractors, allowed, **options) for _ in range(count)]
        same_step = gymnasium.vector.AutoresetMode.SAME_STEP
        self.task = task
        self.environments = gymnasium.vector.SyncVectorEnv([lambda one=one: one for one in made], autoreset_mode=same_step)
        space = made[0].action_space
        self.discrete = type(space).__name__ == "Discrete"
        self.observations = made[0].observation_space.shape[0]
        self.actions = int(space.n) if self.discrete else space.shape[0]
        """How many actions there are, or the length of one."""
        self.low, self.high = (0.0, 0.0) if self.discrete else (space.low, space.high)

    def reset(self, seed: int) -> Floats:
        """Begin new episodes; their observations [N, S]. Later episodes' random numbers follow from `seed` too."""
        return self.environments.reset(seed=seed)[0].astype(np.float32)

    def random(self, count: int, generator: torch.Generator) -> Tensor:
        """Random actions: [count, A] between -1 and 1, or [count, 1] numbers of actions."""
        if self.discrete:
            return torch.randint(self.actions, (count, 1), generator=generator).float()
        return torch.rand(count, self.actions, generator=generator) * 2.0 - 1.0

    def step(self, action: Floats) -> Outcome:
        """Do actions [N, A] between -1 and 1, or [N, 1] numbers of actions."""
        observation, reward, terminated, truncated, info = self.environments.step(self.scaled(action))
        following = observation.astype(np.float32)
        ended = terminated | truncated
        for place in np.flatnonzero(ended):
            following[place] = info["final_obs"][place]
        return Outcome(following, reward.astype(np.float32), terminated, ended, observation.astype(np.float32))

    def scaled(self, action: Floats) -> NDArray:
        """Actions as the task takes them."""
        if self.discrete:
            return action[:, 0].astype(np.int64)
        return self.low + (action.clip(-1.0, 1.0) + 1.0) * 0.5 * (self.high - self.low)


def import_gymnasium() -> Any:
    """The package. Raises ModuleNotFoundError with the remedy."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "lane control needs Gymnasium; install it with pip install 'bellwether[gymnasium]'", name=error.name
        ) from error
    return gymnasium


def make_task(task: str, more_steps: int = 0, distractors: int = 0, allowed: Actions = "either", **options: Any) -> Any:
    """One environment; `options` go to gymnasium.make. States that are numbers become vectors with a 1. Raises as VectorTask."""
    gymnasium = import_gymnasium()
    if task.startswith("bellwether/"):
        from stages.control.tasks import register

        register()
    try:
        limit = gymnasium.spec(task).max_episode_steps
        made = gymnasium.make(task, max_episode_steps=None if limit is None else limit + more_steps, **options)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ParamsError(
            f"task: {task} needs a package that is not installed ({error}); MuJoCo's tasks, from v4 on, need pip install "
            f"'bellwether[control]'"
        ) from error
    except gymnasium.error.Error as error:
        raise ParamsError(f"task: Gymnasium has no {task}: {error}") from error
    if type(made.observation_space).__name__ == "Discrete":
        made = gymnasium.wrappers.FlattenObservation(made)
    _check_spaces(task, made, allowed)
    if limit is None:
        raise ParamsError(f"task: the episodes of {task} have no time limit; register it with max_episode_steps")
    if distractors:
        from stages.control.off_policy.distractors import Distractors

        made = Distractors(made, distractors)
    return made


def _check_spaces(task: str, made: Any, allowed: Actions) -> None:
    """Raise ParamsError if observations are not a vector, or actions not of an allowed kind."""
    seen, action = made.observation_space, made.action_space
    if type(seen).__name__ != "Box" or len(seen.shape) != 1:
        raise ParamsError(f"task: the observations of {task} are {seen}; the agent needs a vector of numbers")
    bounded = type(action).__name__ == "Box" and len(action.shape) == 1 and action.is_bounded()
    numbered = type(action).__name__ == "Discrete" and action.start == 0
    if allowed == "continuous" and not bounded:
        raise ParamsError(
            f"task: the actions of {task} are {action}; the agent needs a vector of bounded numbers, as in Pendulum-v1"
        )
    if allowed == "discrete" and not numbered:
        raise ParamsError(f"task: the actions of {task} are {action}; the agent needs numbered actions, as in CartPole-v1")
    if not bounded and not numbered:
        raise ParamsError(f"task: the actions of {task} are {action}; they must be a bounded vector or have numbers")
