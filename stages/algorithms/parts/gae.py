"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438) with a critic's values, on policy tokens or on turns.

Tokens: the policy tokens of an episode as if they followed one another; environment tokens between two turns are no actions and
are taken out first. Turns: a turn is one action, its value the critic's before its first policy token; every token of a turn has
the turn's advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.advantage import Advantage, turn_sums


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of each row's policy tokens, in order and without gaps: (index [B, P] int64, valid [B, P] bool)."""
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    counts = mask.sum(1)
    width = int(counts.max()) if mask.numel() else 0
    return order[:, :width], torch.arange(width)[None, :] < counts[:, None]


def _check_rewards(batch: TrajectoryBatch) -> None:
    """Raise ValueError for a reward where there is no policy token to take it: it would be lost."""
    spoken = torch.zeros(batch.turn_rewards.shape, dtype=torch.bool)
    rows, columns = batch.mask.nonzero(as_tuple=True)
    spoken[rows, batch.turn[rows, columns].clamp(min=0)] = True
    lost = ((batch.turn_rewards != 0) & ~spoken).any(1)
    if bool(lost.any()):
        raise ValueError(
            f"episodes {lost.nonzero().flatten().tolist()} of the batch have a reward on a turn without policy tokens"
        )
    if batch.token_rewards is not None and bool((batch.token_rewards[~batch.mask] != 0).any()):
        raise ValueError("the batch has token rewards on tokens that are not the policy's; they would be lost")


def token_rewards(batch: TrajectoryBatch, index: Tensor, valid: Tensor) -> Tensor:
    """Rewards on compacted policy tokens [B, P]: a turn's reward falls on the last policy token of the turn, token rewards where
    they are. Raises ValueError for a reward without a policy token to fall on, since it would be lost."""
    _check_rewards(batch)
    turn = batch.turn.gather(1, index).clamp(min=0)
    last = valid.clone()
    last[:, :-1] &= ~valid[:, 1:] | (turn[:, :-1] != turn[:, 1:])
    rewards = torch.where(last, batch.turn_rewards.gather(1, turn), torch.zeros(()))
    if batch.token_rewards is not None:
        rewards = rewards + torch.where(valid, batch.token_rewards.gather(1, index), torch.zeros(()))
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


def _turn_gae(batch: TrajectoryBatch, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and values of turns, each [B, U], 0 for turns without policy tokens."""
    _check_rewards(batch)
    assert batch.values is not None
    values = torch.zeros(batch.turn_rewards.shape)
    rewards = batch.turn_rewards
    if batch.token_rewards is not None:
        rewards = rewards + turn_sums(batch.token_rewards, batch.turn, rewards.shape[1])
    spoken = torch.zeros(batch.turn_rewards.shape, dtype=torch.bool)
    for turn in range(rewards.shape[1]):
        tokens = batch.mask & (batch.turn == turn)
        spoken[:, turn] = tokens.any(1)
        first = tokens.int().argmax(1)
        values[:, turn] = torch.where(spoken[:, turn], batch.values.gather(1, first[:, None])[:, 0], torch.zeros(()))
    return gae(rewards, values, spoken, gamma, lam), values


def gae_advantage(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """`advantages` and the critic's targets `returns` = A + V (both [B, T], 0 off the mask); V of the turn at level turn.

    Raises ValueError if the batch carries no critic values.
    """
    if batch.values is None:
        raise ValueError("rl.advantage.estimator: gae needs a critic's values, and this batch has none; use algorithm: ppo")
    gamma, lam = params.gamma, params.lam
    if params.level == "turn":
        turns, values = _turn_gae(batch, gamma, lam)
        turn = batch.turn.clamp(min=0)
        advantages, held = turns.gather(1, turn) * batch.mask, values.gather(1, turn)
        return batch.with_(advantages=advantages, returns=(advantages + held) * batch.mask)
    index, valid = compact(batch.mask)
    compacted = gae(token_rewards(batch, index, valid), batch.values.gather(1, index), valid, gamma, lam)
    advantages = torch.zeros_like(batch.values).scatter(1, index, compacted) * batch.mask
    return batch.with_(advantages=advantages, returns=(advantages + batch.values) * batch.mask)
