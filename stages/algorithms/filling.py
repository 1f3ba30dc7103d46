"""Batch filling: what happens to dead groups, those whose episodes all have the same return.

With a group baseline a dead group's advantages are 0. `keep` runs them through the model all the same; `drop` leaves them out
of the forward pass. Denominators and batch-wide statistics are taken before, so with a group baseline, outcome credit, no KL
term and no entropy bonus both give the same loss and gradient; otherwise `drop` also leaves out what these would have said.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.advantage import group_sums
from stages.algorithms.contract import TrajectoryBatch


def dead_rows(rewards: Tensor, group: Tensor) -> Tensor:
    """Rows [B] bool whose group's rewards are all equal (a group of one is never dead)."""
    sums, sizes = group_sums(rewards, group)
    spread, _ = group_sums((rewards.double() - sums / sizes).abs(), group)
    return (spread <= 1e-9 * rewards.double().abs().max().clamp(min=1e-300) * sizes) & (sizes > 1)


def dead_groups(batch: TrajectoryBatch) -> int:
    """How many groups are dead."""
    return int(batch.group[dead_rows(batch.rewards, batch.group)].unique().numel())


def forward_rows(batch: TrajectoryBatch, kind: str) -> Tensor:
    """Indices [b] int64 of the rows that go through the model: those with policy tokens, less dead groups for drop."""
    keep = batch.mask.any(1)
    if kind == "drop":
        keep &= ~dead_rows(batch.rewards, batch.group)
    return torch.nonzero(keep).flatten()
