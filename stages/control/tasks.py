"""Our own Gymnasium tasks; `make_task` registers them for names that begin with bellwether/."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

DETOUR = "bellwether/Detour-v0"
STEPS = 40
"""Time limit of an episode."""
SPEED = 0.2
"""Largest move of a step in each direction."""
START, GOAL = np.array([-0.7, -0.7]), np.array([0.7, 0.7])
AROUND, REACHED, RADIUS = 0.1, 0.2, 0.4
"""Spread of the start, radius of the goal, and of the obstacle around the origin."""
COST, PRIZE = 0.02, 1.0
"""Of a step; at the goal, and lost at the obstacle."""


class Detour(gymnasium.Env):
    """A point in a square that moves by at most SPEED in x and in y. The straight way to the goal leads over an obstacle; the
    ways around it begin with one of both coordinates alone, and the mean of both ways is the straight one."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.position = START.copy()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray, dict]:
        super().reset(seed=seed)
        self.position = START + self.np_random.uniform(-AROUND, AROUND, 2)
        return self.position.astype(np.float32), {}

    def step(self, action: NDArray) -> tuple[NDArray, float, bool, bool, dict]:
        self.position = (self.position + SPEED * np.clip(action, -1.0, 1.0)).clip(-1.0, 1.0)
        hit = bool(np.linalg.norm(self.position) < RADIUS)
        reached = bool(np.linalg.norm(self.position - GOAL) < REACHED)
        reward = -COST + PRIZE * (float(reached) - float(hit))
        return self.position.astype(np.float32), reward, hit or reached, False, {}

    def render(self) -> NDArray[np.uint8]:
        """The square from above, [240, 240, 3]: obstacle dark, goal green, the point blue."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (240, 240), (244, 244, 244))
        pen = ImageDraw.Draw(image)
        discs = ((np.zeros(2), RADIUS, (90, 90, 90)), (GOAL, REACHED, (120, 190, 120)), (self.position, 0.05, (40, 90, 180)))
        for centre, radius, colour in discs:
            x, y = 120 + 120 * centre[0], 120 - 120 * centre[1]
            pen.ellipse((x - 120 * radius, y - 120 * radius, x + 120 * radius, y + 120 * radius), fill=colour)
        return np.asarray(image)


def register() -> None:
    """Make the tasks known to Gymnasium."""
    if DETOUR not in gymnasium.registry:
        gymnasium.register(DETOUR, entry_point=Detour, max_episode_steps=STEPS)
