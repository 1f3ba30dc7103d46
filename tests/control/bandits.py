"""A task of one step with numbered actions, whose values are known."""

from __future__ import annotations

import gymnasium
import numpy as np

REWARDS = np.array([[1.0, 0.0, -1.0], [-1.0, 0.5, 0.0]])
"""By state and action."""


class Bandit(gymnasium.Env):
    """Shows one of two states as a unit vector; the reward is REWARDS' and the episode ends."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(3)

    def _seen(self) -> np.ndarray:
        return np.eye(2, dtype=np.float32)[self.state]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(2))
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._seen(), float(REWARDS[self.state, int(action)]), True, False, {}


if "Bandit-v0" not in gymnasium.registry:
    gymnasium.register("Bandit-v0", Bandit, max_episode_steps=2)
