"""Advantages of turns (ArCHer, Zhou et al., arXiv 2402.19446) from the off-policy critic of stages/values/turn_critic.py.

With the critic's twins Q_1, Q_2 of a turn's action a after history s, and V_1, V_2 of s,

    A(s, a) = min(Q_1, Q_2)(s, a) - min(V_1, V_2)(s),

the same for all tokens of the turn; with a baseline b of tokens A - b(s, a^<j) on token j, b being fitted to A.
"""

from __future__ import annotations

import torch

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.advantage import Advantage, rewards_to_go


def turn_critic_advantage(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """`advantages` [B, T] on the tokens of turns, 0 elsewhere; where the batch has `values` of tokens these are the baseline b,
    and `returns` what it is to learn. Raises ValueError if the batch carries no values of turns."""
    if batch.turn_q is None or batch.turn_v is None:
        raise ValueError("rl.advantage.estimator: utterance needs the critic's values of turns, and this batch carries none")
    turns = batch.turn_q.amin(-1) - batch.turn_v.amin(-1)
    advantages = turns.gather(1, batch.turn.clamp(min=0)) * batch.mask
    real = torch.arange(turns.shape[1])[None, :] < batch.turns[:, None]
    batch = batch.with_metrics(**_told(batch.turn_q.amin(-1)[real], turns[real], _togo(batch, params)[real]))
    if batch.values is None:
        return batch.with_(advantages=advantages)
    return batch.with_(advantages=(advantages - batch.values) * batch.mask, returns=advantages)


def _togo(batch: TrajectoryBatch, params: Advantage) -> torch.Tensor:
    """Discounted rewards from each turn on, [B, U] float32."""
    return rewards_to_go(batch.turn_rewards, params.gamma).float()


def _told(q: torch.Tensor, advantages: torch.Tensor, togo: torch.Tensor) -> dict[str, float]:
    """Of N turns: mean Q, mean |A| and, where both differ between turns, the correlation of Q with what came of it."""
    told = {"q_mean": float(q.mean()), "turn_advantage": float(advantages.abs().mean())} if len(q) else {}
    if len(q) > 1 and float(q.std()) > 0 and float(togo.std()) > 0:
        told["q_correlation"] = float(torch.corrcoef(torch.stack([q, togo]))[0, 1])
    return told
