"""Advantages of turns (ArCHer, Zhou et al., arXiv 2402.19446) from the off-policy critic of values/turn_critic.py.

With the critic's twins Q_1, Q_2 of a turn's action a after history s, and V_1, V_2 of s,

    A(s, a) = min(Q_1, Q_2)(s, a) - min(V_1, V_2)(s),

the same for all tokens of the turn; with a token baseline b, A - b(s, a^<j) on token j, b being fitted to A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.algorithms.batch import Extra, TrajectoryBatch
from stages.algorithms.parts.advantage import Advantage, rewards_to_go


@dataclass(frozen=True)
class TurnCritic(Extra):
    """The twins' values, 0 past an episode's end."""

    q: Tensor
    """[B, U, 2] float32: of each turn's action."""
    v: Tensor
    """[B, U, 2] float32: of the history before it."""


def turn_critic_advantage(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """`advantages` [B, T] on the tokens of turns, 0 elsewhere; where the batch has `values` of tokens these are the baseline b,
    and `returns` its targets. Raises ValueError without the critic's values."""
    critic = batch.get(TurnCritic)
    if critic is None:
        raise ValueError("rl.advantage.estimator: utterance needs the critic's values of turns, and this batch has none")
    q = critic.q.amin(-1)
    turns = q - critic.v.amin(-1)
    advantages = turns.gather(1, batch.turn.clamp(min=0)) * batch.mask
    real = batch.real_turns
    to_go = rewards_to_go(batch.turn_rewards, params.gamma).float()
    batch = batch.with_metrics(**_metrics(q[real], turns[real], to_go[real]))
    if batch.values is None:
        return batch.with_(advantages=advantages)
    return batch.with_(advantages=(advantages - batch.values) * batch.mask, returns=advantages)


def _metrics(q: Tensor, advantages: Tensor, to_go: Tensor) -> dict[str, float]:
    """Of N turns: mean Q, mean |A| and, where both vary, the correlation of Q with the discounted reward-to-go."""
    metrics = {"q_mean": float(q.mean()), "turn_advantage": float(advantages.abs().mean())} if len(q) else {}
    if len(q) > 1 and float(q.std()) > 0 and float(to_go.std()) > 0:
        metrics["q_correlation"] = float(torch.corrcoef(torch.stack([q, to_go]))[0, 1])
    return metrics
