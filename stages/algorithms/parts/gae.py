"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438) with a critic's values, on policy tokens or on turns.

Tokens: the policy tokens of an episode as one sequence; the environment's tokens in between are removed first. Turns: a turn is
one action, its value the critic's before its first policy token; all tokens of a turn have the turn's advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.batch import TrajectoryBatch, turn_sums
from stages.algorithms.parts.advantage import Advantage


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of each row's policy tokens, in order and without gaps: (index [B, P] int64, valid [B, P] bool)."""
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    counts = mask.sum(1)
    width = int(counts.max()) if mask.numel() else 0
    return order[:, :width], torch.arange(width)[None, :] < counts[:, None]


def check_rewards(batch: TrajectoryBatch) -> None:
    """Raise ValueError for a reward that no policy token could receive: it would be lost."""
    has_tokens = torch.zeros(batch.turn_rewards.shape, dtype=torch.bool)
    rows, columns = batch.mask.nonzero(as_tuple=True)
    has_tokens[rows, batch.turn[rows, columns].clamp(min=0)] = True
    lost = ((batch.turn_rewards != 0) & ~has_tokens).any(1)
    if bool(lost.any()):
        raise ValueError(
            f"episodes {lost.nonzero().flatten().tolist()} of the batch have a reward on a turn without policy tokens, where it "
            f"would be lost; if environment.constraint forces whole turns, leave the policy a choice in each, or set "
            f"rl.algorithm to one that credits episodes, such as grpo"
        )
    if batch.token_rewards is not None and bool((batch.token_rewards[~batch.mask] != 0).any()):
        raise ValueError("the batch has token rewards on tokens that are not the policy's; they would be lost")


def token_rewards(batch: TrajectoryBatch, index: Tensor, valid: Tensor) -> Tensor:
    """Rewards on compacted policy tokens [B, P]: a turn's reward on the turn's last policy token, token rewards where they are.
    Raises ValueError for a reward that would be lost."""
    check_rewards(batch)
    turn = batch.turn.gather(1, index).clamp(min=0)
    last = valid.clone()
    last[:, :-1] &= ~valid[:, 1:] | (turn[:, :-1] != turn[:, 1:])
    rewards = torch.where(last, batch.turn_rewards.gather(1, turn), torch.zeros(()))
    if batch.token_rewards is not None:
        rewards = rewards + torch.where(valid, batch.token_rewards.gather(1, index), torch.zeros(()))
    return rewards


def gae(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float | Tensor, lam: float) -> Tensor:
    """Generalised advantages [B, P] of rewards and values [B, P] on consecutive actions; 0 where not `valid`. gamma: of all, or
    [B, P], of each action's next state.

    d_t = r_t + gamma V_{t+1} - V_t;  A_t = d_t + gamma lam A_{t+1}.  V after the last action is 0, also where the turn limit cut
    the episode: the limit is part of the task, and no reward comes after it.
    """
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros(rewards.shape[0])
    next_advantage = torch.zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        discount = gamma[:, t] if isinstance(gamma, Tensor) else gamma
        delta = rewards[:, t] + discount * next_value - values[:, t]
        next_advantage = torch.where(valid[:, t], delta + discount * lam * next_advantage, torch.zeros(()))
        next_value = torch.where(valid[:, t], values[:, t], torch.zeros(()))
        advantages[:, t] = next_advantage
    return advantages


def _turn_gae(batch: TrajectoryBatch, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and values of turns, each [B, U], 0 for turns without policy tokens."""
    check_rewards(batch)
    assert batch.values is not None
    values = torch.zeros(batch.turn_rewards.shape)
    rewards = batch.turn_rewards
    if batch.token_rewards is not None:
        rewards = rewards + turn_sums(batch.token_rewards, batch.turn, rewards.shape[1])
    has_tokens = torch.zeros(batch.turn_rewards.shape, dtype=torch.bool)
    for turn in range(rewards.shape[1]):
        tokens = batch.mask & (batch.turn == turn)
        has_tokens[:, turn] = tokens.any(1)
        first = tokens.int().argmax(1)
        values[:, turn] = torch.where(has_tokens[:, turn], batch.values.gather(1, first[:, None])[:, 0], torch.zeros(()))
    return gae(rewards, values, has_tokens, gamma, lam), values


def gae_advantage(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """`advantages` and the critic's targets `returns` = A + V (both [B, T], 0 off the mask); V of the turn at level turn.

    Raises ValueError without a critic's values.
    """
    if batch.values is None:
        raise ValueError("rl.advantage.estimator: gae needs a critic's values, and this batch has none; use algorithm: ppo")
    gamma, lam = params.gamma, params.lam
    if params.level == "turn":
        by_turn, turn_values = _turn_gae(batch, gamma, lam)
        turn = batch.turn.clamp(min=0)
        advantages, values = by_turn.gather(1, turn) * batch.mask, turn_values.gather(1, turn)
    else:
        index, valid = compact(batch.mask)
        compacted = gae(token_rewards(batch, index, valid), batch.values.gather(1, index), valid, gamma, lam)
        advantages, values = torch.zeros_like(batch.values).scatter(1, index, compacted) * batch.mask, batch.values
    return batch.with_(advantages=advantages, returns=(advantages + values) * batch.mask)
