"""Step rewards from a progress estimator (SPA, arXiv 2505.20732): the return divided among the turns that earned it.

`rl.credit.kind: progress`, before the advantage is estimated. With contributions c_i of N turns and g_i = 1 if the environment
accepted turn i's action,

    r_i = weight * c_i + grounding_coef * g_i  (bonus)    or    - grounding_coef * (1 - g_i)  (penalty).

A bonus is paid for every turn, so longer episodes earn more; `share` divides it by N; the penalty, the default, pays nothing for
a turn that changes nothing. `residual` adds the difference between return and contributions to the last turn, or evenly to all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.algorithms.batch import Extra, TrajectoryBatch

if TYPE_CHECKING:
    from stages.algorithms.parts.credit import Credit


@dataclass(frozen=True)
class Progress(Extra):
    contributions: Tensor
    """[B, U] float32: the progress estimator's contribution of each turn to the return; 0 past the end."""


def minus_mean_of_others(rewards: Tensor, group: Tensor) -> Tensor:
    """Each return minus the mean of its group's others, [B] from returns and groups [B]; unchanged if alone in its group."""
    result = rewards.clone()
    for number in group.unique():
        rows = group == number
        count = int(rows.sum())
        if count > 1:
            result[rows] = (rewards[rows] * count - rewards[rows].sum()) / (count - 1)
    return result


def contributions(batch: TrajectoryBatch, params: Credit) -> Tensor:
    """Each turn's share of the return, [B, U], 0 past the end, before weights and grounding.

    Raises ValueError without estimates.
    """
    real = batch.real_turns
    if params.step_reward == "rloo_broadcast":
        return minus_mean_of_others(batch.rewards, batch.group)[:, None] * real
    progress = batch.get(Progress)
    if progress is None:
        raise ValueError("rl.credit.kind: progress needs the progress estimator's contributions, and this batch has none")
    found = progress.contributions * real
    missing = batch.rewards - found.sum(1)
    if params.residual == "last_step":
        rows = torch.arange(batch.size)
        found = found.index_put((rows, (batch.turns - 1).clamp(min=0)), missing * (batch.turns > 0), accumulate=True)
    elif params.residual == "spread":
        found = found + (missing / batch.turns.clamp(min=1))[:, None] * real
    return found


def grounding(batch: TrajectoryBatch, params: Credit) -> Tensor:
    """Rewards for accepted actions, [B, U]. Raises ValueError if the batch does not have `accepted`."""
    if batch.accepted is None:
        raise ValueError("rl.credit.grounding needs the batch's `accepted` (which actions the environment accepted)")
    real, understood, coef = batch.real_turns, batch.accepted.float(), params.grounding_coef
    if params.grounding == "penalty":
        return coef * (understood - 1.0) * real
    return coef * understood * real / (batch.turns.clamp(min=1)[:, None] if params.grounding == "share" else 1.0)


def progress_rewards(batch: TrajectoryBatch, params: Credit) -> TrajectoryBatch:
    """The batch with step rewards as `turn_rewards`, and their sum as `rewards`."""
    found = contributions(batch, params)
    steps = params.weight * found + grounding(batch, params)
    turns = batch.turns.clamp(min=1)
    if params.step_weight == "steps_to_go":
        steps = steps * (turns[:, None] - 1 - torch.arange(steps.shape[1])[None, :]).clamp(min=0)
    assert batch.accepted is not None
    real, progress = batch.real_turns, batch.get(Progress)
    metrics = {"grounded": float((batch.accepted & real).sum() / real.sum().clamp(min=1))}
    if progress is not None:
        metrics["progress_residual"] = float((batch.rewards - (progress.contributions * real).sum(1)).abs().mean())
    return batch.with_(turn_rewards=steps, rewards=steps.sum(1)).with_metrics(**metrics)
