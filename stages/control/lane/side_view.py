"""Pictures of MuJoCo's planar tasks from the side, without OpenGL: what moves along x and z, as Hopper and its kin do."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PLANE, SPHERE, CAPSULE, CYLINDER = 0, 2, 3, 5
"""mujoco.mjtGeom."""
WIDTH, HEIGHT = 480, 320
SKY, GROUND, MARK = (236, 240, 245), (196, 206, 214), (150, 160, 168)
VIEW = 1.7
"""Metres from bottom to top of the picture, in the largest extent of the bodies (at least 1 metre) at the episode's start."""


class SideView:
    """Draws `model` and `data` of a MuJoCo task; the camera follows the bodies along x."""

    def __init__(self, task: Any) -> None:
        self.model, self.data = task.model, task.data
        self.moving = np.flatnonzero(self.model.geom_bodyid > 0)
        low, high = self._reach()
        self.scale = HEIGHT / (VIEW * max(1.0, high - low))
        """Pixels per metre."""
        self.bottom = min(self._floor(), low) - 0.15 * HEIGHT / self.scale

    def _reach(self) -> tuple[float, float]:
        """Lowest and highest z of what moves."""
        height, radius = self.data.geom_xpos[self.moving, 2], self.model.geom_rbound[self.moving]
        return float((height - radius).min()), float((height + radius).max())

    def _floor(self) -> float:
        """Height of the ground; of the lowest body where there is none near it."""
        planes = np.flatnonzero(self.model.geom_type == PLANE)
        low, high = self._reach()
        heights = [float(self.data.geom_xpos[place, 2]) for place in planes]
        return max((one for one in heights if low - (high - low) <= one), default=low)

    def _pixel(self, x: float, z: float) -> tuple[float, float]:
        centre = float(self.data.geom_xpos[self.moving, 0].mean())
        return WIDTH / 2 + (x - centre) * self.scale, HEIGHT - (z - self.bottom) * self.scale

    def draw(self) -> NDArray[np.uint8]:
        """[HEIGHT, WIDTH, 3]."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (WIDTH, HEIGHT), SKY)
        pen = ImageDraw.Draw(image)
        _, ground = self._pixel(0.0, self._floor())
        pen.rectangle((0, ground, WIDTH, HEIGHT), fill=GROUND)
        nearest = round(float(self.data.geom_xpos[self.moving, 0].mean()))
        for metre in range(nearest - 4, nearest + 5):
            x, _ = self._pixel(metre, 0.0)
            pen.line((x, ground, x, ground + 8), fill=MARK, width=2)
        for place in self.moving:
            self._geom(pen, int(place))
        return np.asarray(image)

    def _geom(self, pen: Any, place: int) -> None:
        """Capsules and cylinders as lines with round ends; others as circles, of their bounding radius if they are no spheres."""
        kind, size = int(self.model.geom_type[place]), self.model.geom_size[place]
        centre = self.data.geom_xpos[place]
        axis = self.data.geom_xmat[place].reshape(3, 3)[:, 2]
        long = kind in (CAPSULE, CYLINDER)
        half = axis * size[1] if long else np.zeros(3)
        radius = self.scale * float(size[0] if long or kind == SPHERE else self.model.geom_rbound[place])
        ends = [self._pixel(float(end[0]), float(end[2])) for end in (centre - half, centre + half)]
        colour = tuple(round(255 * float(part)) for part in self.model.geom_rgba[place][:3])
        pen.line([*ends[0], *ends[1]], fill=colour, width=max(1, round(2 * radius)))
        for x, y in ends:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
