"""Whole groups: for losses that compare the episodes of a group with one another, so that a micro-batch must hold all of them.

Rows count that are trained on: those with policy tokens and a weight above 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.batch import TrajectoryBatch


def places(group: Tensor) -> tuple[Tensor, int]:
    """Group numbers [b] as places 0, 1, ... on their device, and how many groups there are."""
    numbers, place = group.unique(return_inverse=True)
    return place, len(numbers)


def sums_by_group(values: Tensor, group: Tensor) -> Tensor:
    """Sum of `values` [b] over each row's own group, [b], with gradients."""
    place, count = places(group)
    return values.new_zeros(count).index_add(0, place, values)[place]


def count_members(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch with `members` [B]: rows of each row's group that are trained on."""
    trained = (batch.mask.any(1) & (batch.weights > 0)).double()
    return batch.with_(members=sums_by_group(trained, batch.group).long())


def check_whole(micro: TrajectoryBatch) -> None:
    """Raise ValueError if the micro-batch holds a part of a group, or was not told how large its groups are."""
    if micro.members is None:
        raise ValueError("the method needs whole groups, and the batch does not tell how many rows they have; prepare it first")
    found = sums_by_group(torch.ones_like(micro.members), micro.group)
    split = found != micro.members
    if bool(split.any()):
        group = int(micro.group[split][0])
        raise ValueError(
            f"a micro-batch holds {int(found[split][0])} of the {int(micro.members[split][0])} rows of group {group}, and the "
            f"method's loss compares all of them; plan micro-batches of whole groups"
        )
