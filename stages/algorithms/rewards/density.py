"""How often an episode is rewarded: at every step that gets nearer to the goal, or once at its end (Wang and Ammanabrolu,
arXiv 2510.01132)."""

from __future__ import annotations

import torch
from torch import Tensor


def single(success: Tensor, turns: Tensor, width: int) -> Tensor:
    """1 on the last turn of a success, else 0: [B, U] from success [B] bool and turns [B]; width: U."""
    last = torch.arange(width, device=turns.device)[None, :] == (turns - 1)[:, None]
    return (last & success[:, None]).float()


def dense(increments: Tensor, success: Tensor, divisor: str, max_total: float) -> Tensor:
    """The environment's increments [B, U] divided by one number per episode.

    max_total: the same for all, so that no failure can be paid more than a success. reference: what the paper's code does, the
    number of positive increments (at least 1) of a success and `max_total` of a failure.
    """
    divisors = torch.full_like(increments[:, 0], max_total)
    if divisor == "reference":
        divisors = torch.where(success, (increments > 0).sum(1).clamp(min=1).float(), divisors)
    return increments / divisors[:, None]
