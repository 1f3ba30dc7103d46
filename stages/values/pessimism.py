"""Ensembles of critics that are pessimistic where there are no data: the smallest value counts.

RAVL (Sims et al., arXiv 2402.12527): members agree where they were trained and differ elsewhere, and so their minimum does not
reward what no data speak of. EDAC (An et al., arXiv 2110.01548) keeps members apart by the cosines of their gradients.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregate = Literal["min", "mean", "min_of_2"]


def aggregated(values: Tensor, aggregate: Aggregate) -> Tensor:
    """The ensemble's value [...] of its members' [N, ...]. min_of_2: the mean over all pairs of members of the smaller one; of
    members in rising order, the i-th (from 0) is that in N - 1 - i pairs. One member is its own pair."""
    if aggregate == "mean":
        return values.mean(0)
    if aggregate == "min" or len(values) == 1:
        return values.min(0).values
    pairs = torch.arange(len(values) - 1, -1, -1, dtype=values.dtype)
    return torch.tensordot(pairs / pairs.sum(), values.sort(0).values, 1)


def similarity(gradients: Tensor) -> Tensor:
    """Mean over the batch of the sum of cosines between all ordered pairs of critics' gradients [N, B, A], divided by N - 1: N if
    all are equal, 0 if they are orthogonal. EDAC and RAVL keep it low."""
    count = len(gradients)
    units = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
    return ((units.sum(0) ** 2).sum(-1) - count).mean() / (count - 1)


def disagreement(values: Tensor) -> Tensor:
    """Standard deviation [...] over members' values [N, ...]."""
    return torch.std(values, 0, correction=0)
