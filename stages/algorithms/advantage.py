"""Advantages: what each policy token is credited with, before step credit. Pure functions; nothing here has a gradient.

Two estimators. `group`: the episode's return minus a baseline (`mean` axis), over a scale (`std` axis), the same for all policy
tokens of the episode. `gae`: generalised advantage estimation (Schulman et al., arXiv 1506.02438) over the policy tokens of an
episode as if they followed one another: environment tokens between two turns are no actions and are taken out first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.contract import TrajectoryBatch, masked_whiten
from stages.params import Advantage

STD_EPS = 1e-6
_FLAT = 1e-9
"""A standard deviation below this share of the largest |reward| is rounding: the rewards are equal and the scale is 0."""


def group_sums(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of `values` [B] (float64) and count over each row's own group, both [B]."""
    count = int(group.max()) + 1 if group.numel() else 0
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, group, values.double())
    sizes = torch.zeros(count, dtype=torch.float64).index_add_(0, group, torch.ones_like(values, dtype=torch.float64))
    return sums[group], sizes[group]


def _refuse_single(sizes: Tensor, axis: str) -> None:
    if bool((sizes < 2).any()):
        raise ValueError(f"rl.advantage.{axis} compares the episodes of a group, and a group has only one; use group_size >= 2")


def baseline(rewards: Tensor, group: Tensor, kind: str) -> Tensor:
    """The baseline of each episode, [B] float64, from rewards [B] and group indices [B].

    none: 0. group: mean of the episode's group. batch: mean of all. leave_one_out: mean of the group's other episodes (RLOO).
    Raises ValueError for a group of one episode with `group` or `leave_one_out`.
    """
    rewards = rewards.double()
    if kind == "none":
        return torch.zeros_like(rewards)
    if kind == "batch":
        return rewards.mean().expand_as(rewards)
    sums, sizes = group_sums(rewards, group)
    _refuse_single(sizes, f"mean: {kind}")
    return sums / sizes if kind == "group" else (sums - rewards) / (sizes - 1)


def scale(rewards: Tensor, group: Tensor, kind: str) -> Tensor:
    """What centred rewards are divided by, [B] float64: 1 (none), or the standard deviation with Bessel's correction (n - 1) of
    the raw rewards over the group or the whole batch, plus 1e-6; infinite where all rewards are equal, so that A = 0.

    Raises ValueError for a group (or batch) of one episode.
    """
    rewards = rewards.double()
    if kind == "none":
        return torch.ones_like(rewards)
    if kind == "batch":
        group = torch.zeros_like(group)
    sums, sizes = group_sums(rewards, group)
    _refuse_single(sizes, f"std: {kind}")
    squares, _ = group_sums((rewards - sums / sizes) ** 2, group)
    std = (squares / (sizes - 1)).sqrt()
    flat = std <= _FLAT * rewards.abs().max().clamp(min=1e-300)
    return torch.where(flat, torch.full_like(std, torch.inf), std + STD_EPS)


def episode_advantages(rewards: Tensor, group: Tensor, mean: str, std: str) -> Tensor:
    """(R - baseline) / scale for each episode, [B] float32."""
    return ((rewards.double() - baseline(rewards, group, mean)) / scale(rewards, group, std)).float()


def group_advantage(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """`advantages` [B, T]: the episode's advantage on each of its policy tokens, 0 elsewhere."""
    episode = episode_advantages(batch.rewards, batch.group, params.mean or "none", params.std or "none")
    return batch.with_(advantages=episode[:, None] * batch.mask)


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of each row's policy tokens, in order and without gaps: (index [B, P] int64, valid [B, P] bool)."""
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    counts = mask.sum(1)
    width = int(counts.max()) if mask.numel() else 0
    return order[:, :width], torch.arange(width)[None, :] < counts[:, None]


def token_rewards(batch: TrajectoryBatch, index: Tensor, valid: Tensor) -> Tensor:
    """Rewards on compacted policy tokens [B, P]: a turn's reward falls on the last policy token of the turn.

    Raises ValueError if a turn with a reward has no policy token, since that reward would be lost.
    """
    turn = batch.turn.gather(1, index).clamp(min=0)
    last = valid.clone()
    last[:, :-1] &= ~valid[:, 1:] | (turn[:, :-1] != turn[:, 1:])
    rewards = torch.where(last, batch.turn_rewards.gather(1, turn), torch.zeros(()))
    lost = (rewards.sum(1) - batch.turn_rewards.sum(1)).abs() > 1e-5
    if bool(lost.any()):
        raise ValueError(
            f"episodes {lost.nonzero().flatten().tolist()} of the batch have a reward on a turn without policy tokens"
        )
    return rewards


def gae(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantages [B, P] of rewards and values [B, P] on consecutive actions; 0 where not `valid`.

    d_t = r_t + gamma V_{t+1} - V_t;  A_t = d_t + gamma lam A_{t+1};  V after the last action is 0: an episode cut by the turn
    limit has had its return, because the limit is part of the task.
    """
    advantages = torch.zeros_like(rewards)
    following_value = torch.zeros(rewards.shape[0])
    following = torch.zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        following = torch.where(valid[:, t], delta + gamma * lam * following, torch.zeros(()))
        following_value = torch.where(valid[:, t], values[:, t], torch.zeros(()))
        advantages[:, t] = following
    return advantages


def gae_advantage(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """`advantages` and the critic's targets `returns` = A + V (both [B, T], 0 off the mask).

    Raises ValueError if the batch carries no critic values.
    """
    if batch.values is None:
        raise ValueError("rl.advantage.estimator: gae needs a critic's values, and this batch has none; use algorithm: ppo")
    index, valid = compact(batch.mask)
    values = batch.values.gather(1, index)
    rewards = token_rewards(batch, index, valid)
    gamma = 1.0 if params.gamma is None else params.gamma
    lam = 1.0 if params.lam is None else params.lam
    compacted = gae(rewards, values, valid, gamma, lam)
    advantages = torch.zeros_like(batch.values).scatter(1, index, compacted) * batch.mask
    return batch.with_(advantages=advantages, returns=(advantages + batch.values) * batch.mask)


def advantage(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """The batch with `advantages` (and `returns`) by the resolved parameters; `whiten` normalises them over the policy tokens."""
    batch = gae_advantage(batch, params) if params.estimator == "gae" else group_advantage(batch, params)
    if params.whiten and batch.advantages is not None:
        batch = batch.with_(advantages=masked_whiten(batch.advantages, batch.mask))
    return batch
