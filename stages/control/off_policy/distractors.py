"""Numbers in the observations that no action changes and no reward depends on."""

from __future__ import annotations

import gymnasium
import numpy as np
from numpy.typing import NDArray

FREQUENCIES = (0.05, 0.5)
"""Of the slowest and the fastest oscillator, in radians per step."""


class Distractors(gymnasium.ObservationWrapper):
    """Adds `count` / 2 oscillators, each as cosine and sine, whose phases are drawn at every episode's start."""

    def __init__(self, task: gymnasium.Env, count: int) -> None:
        super().__init__(task)
        self.speed = np.linspace(*FREQUENCIES, count // 2)
        self.phase = np.zeros(count // 2)
        seen = task.observation_space
        self.observation_space = gymnasium.spaces.Box(
            np.concatenate([seen.low, np.full(count, -1.0, seen.dtype)]),
            np.concatenate([seen.high, np.full(count, 1.0, seen.dtype)]),
            dtype=seen.dtype,
        )

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[NDArray, dict]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.phase = self.env.unwrapped.np_random.uniform(0.0, 2 * np.pi, len(self.speed))
        return self.observation(observation), info

    def step(self, action: NDArray) -> tuple[NDArray, float, bool, bool, dict]:
        self.phase = self.phase + self.speed
        return super().step(action)

    def observation(self, observation: NDArray) -> NDArray:
        return np.concatenate([observation, np.cos(self.phase), np.sin(self.phase)]).astype(self.observation_space.dtype)
