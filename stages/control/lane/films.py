"""Films of a policy: animated WebP of one episode, drawn by Gymnasium, or from the side for MuJoCo's tasks."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stages.control.lane.settings import Film
from stages.control.lane.side_view import SideView
from stages.control.learnt import Act
from stages.control.off_policy.vector_task import VectorTask, make_task
from stages.runtime.validation import ParamsError

FRAME_MS = 60


def film(act: Act, task: str, distractors: int, settings: Film) -> bytes:
    """An episode that begins with seed 0, and further ones until there are enough frames. Raises ParamsError if the task can't be
    drawn or lacks the package for it."""
    from PIL import Image

    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory; without a display it would complain
    options = {} if is_mujoco(make_task(task)) else {"render_mode": "rgb_array"}
    drawn = VectorTask(task, 1, distractors=distractors, allowed="either", **options)
    observation, frames = drawn.reset(0), []
    picture = camera(drawn.environments.envs[0], task)
    for step in range(settings.frames * settings.every):
        if step % settings.every == 0:
            frames.append(Image.fromarray(picture()))
        observation = drawn.step(act(torch.from_numpy(observation)).numpy()).observation
    height = round(settings.width * frames[0].height / frames[0].width)
    small = [frame.resize((settings.width, height), Image.Resampling.LANCZOS) for frame in frames]
    written = io.BytesIO()
    small[0].save(written, "WEBP", save_all=True, append_images=small[1:], duration=FRAME_MS, loop=0, quality=60, method=4)
    return written.getvalue()


def is_mujoco(task: Any) -> bool:
    """Whether the task has MuJoCo's model, which `SideView` draws: its own pictures need OpenGL."""
    return hasattr(task.unwrapped, "model") and hasattr(task.unwrapped, "data")


def camera(task: Any, name: str) -> Callable[[], np.ndarray]:
    """What draws an environment as an image [height, width, 3]."""
    return SideView(task.unwrapped).draw if is_mujoco(task) else lambda: rendered(task, name)


def rendered(task: Any, name: str) -> np.ndarray:
    import gymnasium

    try:
        return np.asarray(task.render())
    except gymnasium.error.DependencyNotInstalled as error:
        raise ParamsError(
            f"film: drawing {name} needs a package that is not installed ({error}); install it with pip install "
            f"'bellwether[control]', or set film: null"
        ) from error
