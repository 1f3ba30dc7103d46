"""Policy losses per token: pure functions of the current log-probabilities [b, T]. Minimised; aggregation comes after."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.contract import TrajectoryBatch
from stages.parameters.rl import Loss


def advantages_of(batch: TrajectoryBatch) -> Tensor:
    """The batch's advantages [b, T]. Raises ValueError if it has none yet."""
    if batch.advantages is None:
        raise ValueError("the batch has no advantages; run the advantage part before the loss")
    return batch.advantages


def clip_range(params: Loss) -> tuple[float, float]:
    """(1 - clip_low, 1 + clip_high). Raises ValueError if they are null."""
    if params.clip_low is None or params.clip_high is None:
        raise ValueError(f"rl.loss.clip_low and clip_high must be numbers for kind {params.kind}; resolve the parameters first")
    return 1 - params.clip_low, 1 + params.clip_high


def log_ratio(logprobs: Tensor, batch: TrajectoryBatch) -> Tensor:
    """log pi(y_t) - log pi_old(y_t) on policy tokens, 0 elsewhere: [b, T]."""
    return torch.where(batch.mask, logprobs - batch.logprobs_old, torch.zeros_like(logprobs))


def sequence_log_ratio(logprobs: Tensor, batch: TrajectoryBatch) -> Tensor:
    """Mean of `log_ratio` over an episode's policy tokens, on each of them, 0 elsewhere: [b, T] (GSPO's log s_i)."""
    means = log_ratio(logprobs, batch).sum(1) / batch.mask.sum(1).clamp(min=1)
    return torch.where(batch.mask, means[:, None], torch.zeros_like(logprobs))


def policy_gradient(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """REINFORCE's term -A_t log pi(y_t), [b, T], 0 off the mask (Williams 1992). No correction for off-policy data."""
    return torch.where(batch.mask, -advantages_of(batch) * logprobs, torch.zeros_like(logprobs))


def importance(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-rho_t A_t with rho_t = exp(log pi - log pi_old), [b, T], 0 off the mask: `ppo_clip` without its clip."""
    return torch.where(batch.mask, -log_ratio(logprobs, batch).exp() * advantages_of(batch), torch.zeros_like(logprobs))


def _clipped_surrogate(logs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-min(rho A, clip(rho) A) with rho = exp(logs) [b, T]; at most dual_clip |A| where A < 0."""
    low, high = clip_range(params)
    ratio, advantages = logs.exp(), advantages_of(batch)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if params.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -params.dual_clip * advantages), loss)
    return torch.where(batch.mask, loss, torch.zeros_like(loss))


def ppo_clip(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t), [b, T], 0 off the mask (Schulman et al., arXiv 1707.06347).

    rho_t = exp(log pi - log pi_old). At rho = 1 the gradient is that of `policy_gradient`. dual_clip (Ye et al., arXiv
    1912.09729): for A < 0 the loss is at most dual_clip |A|.
    """
    return _clipped_surrogate(log_ratio(logprobs, batch), batch, params)


def gspo(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """`ppo_clip` with one ratio per episode, exp(mean_t (log pi - log pi_old)) (Zheng et al., arXiv 2507.18071): [b, T], the same
    on all policy tokens of an episode where the advantage is; seq_mean_token_mean then gives the mean over episodes."""
    return _clipped_surrogate(sequence_log_ratio(logprobs, batch), batch, params)


def cispo(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-sg[clip(rho_t, 1 - clip_low, 1 + clip_high)] A_t log pi(y_t), [b, T] (MiniMax-M1, arXiv 2506.13585): the weight is cut,
    not the token's gradient."""
    low, high = clip_range(params)
    weight = log_ratio(logprobs.detach(), batch).exp().clamp(low, high)
    return torch.where(batch.mask, -weight * advantages_of(batch) * logprobs, torch.zeros_like(logprobs))


def clipped(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """Tokens [b, T] bool where clipping acts: without gradient under ppo_clip and gspo, of a cut weight under cispo."""
    if params.kind not in ("ppo_clip", "gspo", "cispo"):
        return torch.zeros_like(batch.mask)
    low, high = clip_range(params)
    ratio = (sequence_log_ratio if params.kind == "gspo" else log_ratio)(logprobs, batch).exp()
    advantages = advantages_of(batch)
    above, below = ratio > high, ratio < low
    if params.kind == "cispo":
        return (above | below) & batch.mask
    acts = (above & (advantages > 0)) | (below & (advantages < 0))
    if params.dual_clip is not None:
        acts |= (ratio > params.dual_clip) & (advantages < 0)
    return acts & batch.mask


LOSSES = {"policy_gradient": policy_gradient, "importance": importance, "ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}
