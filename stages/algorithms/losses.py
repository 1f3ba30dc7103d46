"""Policy losses per token: pure functions of the current log-probabilities [b, T]. Minimised; aggregation comes after."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.contract import TrajectoryBatch
from stages.params import Loss


def _advantages(batch: TrajectoryBatch) -> Tensor:
    if batch.advantages is None:
        raise ValueError("the batch has no advantages; run the advantage part before the loss")
    return batch.advantages


def log_ratio(logprobs: Tensor, batch: TrajectoryBatch) -> Tensor:
    """log pi(y_t) - log pi_old(y_t) on policy tokens, 0 elsewhere: [b, T]."""
    return torch.where(batch.mask, logprobs - batch.logprobs_old, torch.zeros_like(logprobs))


def policy_gradient(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """REINFORCE's term -A_t log pi(y_t), [b, T], 0 off the mask (Williams 1992). No correction for off-policy data."""
    return torch.where(batch.mask, -_advantages(batch) * logprobs, torch.zeros_like(logprobs))


def ppo_clip(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t), [b, T], 0 off the mask (Schulman et al., arXiv 1707.06347).

    rho_t = exp(log pi - log pi_old). At rho = 1 the gradient is that of `policy_gradient`.
    """
    low, high = params.clip_low, params.clip_high
    if low is None or high is None:
        raise ValueError("rl.loss.clip_low and clip_high must be numbers for kind ppo_clip; resolve the parameters first")
    ratio = log_ratio(logprobs, batch).exp()
    advantages = _advantages(batch)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return torch.where(batch.mask, loss, torch.zeros_like(loss))


def clipped(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """Where the clipped branch is the active one, so that the token has no gradient: [b, T] bool."""
    ratio = log_ratio(logprobs, batch).exp()
    advantages = _advantages(batch)
    above = (ratio > 1 + (params.clip_high or 0.0)) & (advantages > 0)
    below = (ratio < 1 - (params.clip_low or 0.0)) & (advantages < 0)
    return (above | below) & batch.mask


LOSSES = {"policy_gradient": policy_gradient, "ppo_clip": ppo_clip}
