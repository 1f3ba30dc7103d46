"""Films of a policy: animated WebP of one episode, drawn by Gymnasium."""

from __future__ import annotations

import io

import numpy as np
import torch

from stages.control.lane.settings import Film
from stages.control.learnt import Act
from stages.control.off_policy.vector_task import VectorTask
from stages.runtime.validation import ParamsError

FRAME_MS = 60


def film(act: Act, task: str, distractors: int, settings: Film) -> bytes:
    """An episode that begins with seed 0, and further ones until there are enough frames. Raises ParamsError if the task can't be
    drawn or lacks the package for it."""
    from PIL import Image

    drawn = VectorTask(task, 1, distractors=distractors, allowed="either", render_mode="rgb_array")
    observation, frames = drawn.reset(0), []
    for step in range(settings.frames * settings.every):
        if step % settings.every == 0:
            frames.append(Image.fromarray(picture(drawn, task)))
        observation = drawn.step(act(torch.from_numpy(observation)).numpy()).observation
    height = round(settings.width * frames[0].height / frames[0].width)
    small = [frame.resize((settings.width, height), Image.Resampling.LANCZOS) for frame in frames]
    written = io.BytesIO()
    small[0].save(written, "WEBP", save_all=True, append_images=small[1:], duration=FRAME_MS, loop=0, quality=60, method=4)
    return written.getvalue()


def picture(task: VectorTask, name: str) -> np.ndarray:
    """The first environment as an image [height, width, 3]."""
    import gymnasium

    try:
        return np.asarray(task.environments.envs[0].render())
    except gymnasium.error.DependencyNotInstalled as error:
        raise ParamsError(
            f"film: drawing {name} needs a package that is not installed ({error}); install it with pip install "
            f"'bellwether[control]', or set film: null"
        ) from error
