"""Rewards of steps from a progress estimator (SPA, arXiv 2505.20732): the return spread over the turns that earned it.

`rl.credit.kind: progress`, before the advantage is estimated. With contributions c_i of N turns and g_i = 1 where the environment
understood turn i's action,

    r_i = weight * c_i + grounding_coef * g_i  (bonus)    or    - grounding_coef * (1 - g_i)  (penalty).

A bonus is paid for every turn, so that longer episodes earn more; `share` divides it by N; the penalty, the default, pays nothing
for a turn that changes nothing. What the contributions lack of the return `residual` can put on the last turn or spread over all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.algorithms.batch import TrajectoryBatch

if TYPE_CHECKING:
    from stages.algorithms.parts.credit import Credit


def left_out(rewards: Tensor, group: Tensor) -> Tensor:
    """Each return minus the mean of its group's others, [B] from returns and groups [B]; alone in its group it stays as it is."""
    result = rewards.clone()
    for number in group.unique():
        rows = group == number
        count = int(rows.sum())
        if count > 1:
            result[rows] = (rewards[rows] * count - rewards[rows].sum()) / (count - 1)
    return result


def contributions(batch: TrajectoryBatch, params: Credit) -> Tensor:
    """What each turn is said to have earned, [B, U], 0 past the end, before weights and grounding.

    Raises ValueError if the batch carries no estimates.
    """
    real = torch.arange(batch.turn_rewards.shape[1])[None, :] < batch.turns[:, None]
    if params.step_reward == "rloo_broadcast":
        return left_out(batch.rewards, batch.group)[:, None] * real
    if batch.turn_progress is None:
        raise ValueError("rl.credit.kind: progress needs the progress estimator's contributions, and this batch carries none")
    found = batch.turn_progress * real
    missing = batch.rewards - found.sum(1)
    if params.residual == "last_step":
        rows = torch.arange(batch.size)
        found = found.index_put((rows, (batch.turns - 1).clamp(min=0)), missing * (batch.turns > 0), accumulate=True)
    elif params.residual == "spread":
        found = found + (missing / batch.turns.clamp(min=1))[:, None] * real
    return found


def grounding(batch: TrajectoryBatch, params: Credit) -> Tensor:
    """The grounding signal's part of the rewards, [B, U]. Raises ValueError if the batch does not tell what was understood."""
    if batch.accepted is None:
        raise ValueError(
            "rl.credit.grounding needs to know which actions the environment understood, and this batch does not tell"
        )
    real = torch.arange(batch.turn_rewards.shape[1])[None, :] < batch.turns[:, None]
    understood, coef = batch.accepted.float(), params.grounding_coef
    if params.grounding == "penalty":
        return coef * (understood - 1.0) * real
    return coef * understood * real / (batch.turns.clamp(min=1)[:, None] if params.grounding == "share" else 1.0)


def progress_rewards(batch: TrajectoryBatch, params: Credit) -> TrajectoryBatch:
    """The batch with the rewards of steps as `turn_rewards`, which `rewards` sums up."""
    found = contributions(batch, params)
    steps = params.weight * found + grounding(batch, params)
    turns = batch.turns.clamp(min=1)
    if params.step_weight == "steps_to_go":
        steps = steps * (turns[:, None] - 1 - torch.arange(steps.shape[1])[None, :]).clamp(min=0)
    assert batch.accepted is not None
    real = torch.arange(steps.shape[1])[None, :] < batch.turns[:, None]
    told = {"grounded": float((batch.accepted & real).sum() / real.sum().clamp(min=1))}
    if batch.turn_progress is not None:
        told["progress_residual"] = float((batch.rewards - (batch.turn_progress * real).sum(1)).abs().mean())
    return batch.with_(turn_rewards=steps, rewards=steps.sum(1)).with_metrics(**told)
