"""Histograms of the magnitudes of task vectors, from which a threshold over all tensors follows in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.merging.deltas import kept_count

if TYPE_CHECKING:
    from torch import Tensor

# Magnitudes are binned by the top 20 of the 31 bits that order non-negative float32: 2**20 bins of relative width 2**-12.
_DROPPED_BITS = 11
BINS = 1 << 20


def magnitude_bins(delta: Tensor) -> Tensor:
    """Bin of each |entry|, [n] int64, monotonic in the magnitude."""
    import torch

    return (delta.reshape(-1).abs().view(torch.int32) >> _DROPPED_BITS).long()


def histograms(deltas: Tensor) -> Tensor:
    """[N, 2**20] int64, one per model, of deltas [N, *shape]."""
    import torch

    return torch.stack([torch.bincount(magnitude_bins(delta), minlength=BINS) for delta in deltas])


def global_threshold(counts: Tensor, density: float) -> Tensor:
    """Smallest magnitude to keep, scalar float32, from a model's histogram `counts`: [2**20] int64.

    It is the lower edge of the bin of the entry of rank int(density * n): at least that many entries are kept, and the surplus is
    within a relative 2**-12 of it.
    """
    import torch

    at_least = counts.flip(0).cumsum(0)
    keep = kept_count(density, int(at_least[-1]))
    from_top = int(torch.searchsorted(at_least, torch.tensor(keep)))
    return torch.tensor((BINS - 1 - from_top) << _DROPPED_BITS, dtype=torch.int32).view(torch.float32)
