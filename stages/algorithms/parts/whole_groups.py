"""Whole groups: for losses that compare the episodes of a group, so that a micro-batch must contain all of them.

Only rows that are trained on count as members: those with policy tokens and a weight above 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.algorithms.batch import Extra, TrajectoryBatch


@dataclass(frozen=True)
class GroupSizes(Extra):
    members: Tensor
    """[B] int64: rows of the row's group that are trained on."""


def sums_by_group(values: Tensor, group: Tensor) -> Tensor:
    """Sum of `values` [b] over each row's group, [b], with gradients."""
    numbers, place = group.unique(return_inverse=True)
    return values.new_zeros(len(numbers)).index_add(0, place, values)[place]


def with_group_sizes(batch: TrajectoryBatch) -> TrajectoryBatch:
    trained = (batch.mask.any(1) & (batch.weights > 0)).double()
    return batch.with_extra(GroupSizes(sums_by_group(trained, batch.group).long()))


def check_whole_groups(micro: TrajectoryBatch) -> None:
    """Raise ValueError if the micro-batch splits a group, or has no GroupSizes to tell."""
    sizes = micro.get(GroupSizes)
    if sizes is None:
        raise ValueError("the method needs whole groups, and the batch has no GroupSizes; call Algorithm.prepare first")
    found = sums_by_group(torch.ones_like(sizes.members), micro.group)
    split = found != sizes.members
    if bool(split.any()):
        group = int(micro.group[split][0])
        raise ValueError(
            f"a micro-batch has {int(found[split][0])} of the {int(sizes.members[split][0])} rows of group {group}, and the "
            f"method's loss compares all of them; plan micro-batches of whole groups"
        )
