"""AdamW, and learning rates as pure functions of the update's index, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

Schedule = Callable[[int], float]
"""Index of the update, from 0 -> learning rate."""

BETAS = (0.9, 0.95)
COSINE_FLOOR = 0.1


def make_optimiser(
    module: nn.Module, learning_rate: float, weight_decay: float, betas: tuple[float, float] = BETAS
) -> torch.optim.AdamW:
    """AdamW over the module's parameters; matrices decay, vectors (norms, biases) do not."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas, fused=True)


def warmup_cosine(learning_rate: float, total: int, warmup: float) -> Schedule:
    """Linear over the first `warmup` fraction of `total` updates, then a half cosine down to a tenth."""
    rising = max(1, round(warmup * total))

    def rate(update: int) -> float:
        if update < rising:
            return learning_rate * (update + 1) / rising
        progress = min(1.0, (update - rising) / max(1, total - rising))
        return learning_rate * (COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))

    return rate


def warmup_stable_decay(learning_rate: float, total: int, warmup: float, decay: float) -> Schedule:
    """Linear over the first `warmup` fraction of `total` updates, constant, then linear to a tenth over the last `decay`
    fraction."""
    rising, falling = max(1, round(warmup * total)), max(1, round(decay * total))

    def rate(update: int) -> float:
        if update < rising:
            return learning_rate * (update + 1) / rising
        left = min(1.0, max(0, total - update) / falling)
        return learning_rate * (COSINE_FLOOR + (1 - COSINE_FLOOR) * left)

    return rate


def warmup_constant(learning_rate: float, warmup_steps: int) -> Schedule:
    """Linear over `warmup_steps` updates, then constant."""
    return lambda update: learning_rate * min(1.0, (update + 1) / (warmup_steps + 1))
