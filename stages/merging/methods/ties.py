"""ties: trim each task vector to its largest entries, elect a sign per entry, average the entries that agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from stages.merging.deltas import DeltaMethod, combine, kept_count, task_vectors
from stages.merging.settings import MergeParams, Normalized, Scaled, Sparse
from stages.records.card import Card
from stages.runtime.validation import Section

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Magnitudes are binned by the top 20 of the 31 bits that order non-negative float32: 2**20 bins of relative width 2**-12.
_DROPPED_BITS = 11
_BINS = 1 << 20


def trim(delta: Tensor, density: float) -> Tensor:
    """`delta` with all but its int(density * n) largest magnitudes set to 0; ties keep the earlier entries."""
    import torch

    flat = delta.reshape(-1)
    if flat.numel() == 0:
        return delta
    keep = kept_count(density, flat.numel())
    magnitude = flat.abs()
    threshold = torch.kthvalue(magnitude, flat.numel() - keep + 1).values
    mask = magnitude > threshold
    level = torch.nonzero(magnitude == threshold).reshape(-1)
    mask[level[: keep - int(mask.sum())]] = True
    return (flat * mask).reshape(delta.shape)


def magnitude_bins(delta: Tensor) -> Tensor:
    """Bin of each |entry|, [n] int64, monotonic in the magnitude."""
    import torch

    return (delta.reshape(-1).abs().view(torch.int32) >> _DROPPED_BITS).long()


def global_threshold(counts: Tensor, density: float) -> Tensor:
    """Smallest magnitude to keep, scalar float32, from a model's histogram `counts`: [2**20] int64.

    It is the lower edge of the bin of the entry of rank int(density * n): at least that many entries are kept, and the surplus is
    within a relative 2**-12 of it.
    """
    import torch

    at_least = counts.flip(0).cumsum(0)
    keep = kept_count(density, int(at_least[-1]))
    from_top = int(torch.searchsorted(at_least, torch.tensor(keep)))
    return torch.tensor((_BINS - 1 - from_top) << _DROPPED_BITS, dtype=torch.int32).view(torch.float32)


class TiesOptions(Section):
    """ties, dare_ties."""

    scope: Literal["global", "tensor"] = "tensor"
    """Whether entries are trimmed over all weights or per tensor."""


class Settings(Normalized, Scaled, Sparse):
    """normalize null: true."""

    ties: TiesOptions = TiesOptions()


class Ties(DeltaMethod):
    """theta_0 + lam * (mean over the agreeing models of trimmed w_i t_i).

    ties.scope `tensor` trims every tensor on its own; `global` trims the flattened model (needs a first pass).
    """

    card = Card(
        slug="ties",
        title="TIES-Merging",
        paper="Yadav et al., arXiv 2306.01708",
        equation="theta = theta_0 + lam * sum_{i agrees} w_i trim(t_i) / sum_{i agrees} w_i, sign elected by sum_i w_i trim(t_i)",
        assumptions="Small entries of a task vector are redundant; models that disagree in sign interfere.",
        reduces_to="density 1, no sign conflicts, no zeros: linear.",
        tested_by="tests/merging/test_ties.py",
        switch="merge.method: ties",
    )
    Settings = Settings

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams) -> Mapping[str, Any] | None:
        """Histograms of the magnitudes, [N, 2**20] int64, for the global scope; None for the tensor scope."""
        import torch

        if params.settings.ties.scope == "tensor":
            return None
        deltas = task_vectors(name, base, models)
        return {"magnitudes": torch.stack([torch.bincount(magnitude_bins(delta), minlength=_BINS) for delta in deltas])}

    def merged_delta(self, deltas: Tensor, params: MergeParams, rng: Generator, totals: Mapping[str, Any] | None) -> Tensor:
        import torch

        if params.settings.ties.scope == "global" and totals is not None:
            limits = [global_threshold(counts, params.settings.density) for counts in totals["magnitudes"]]
            deltas = torch.stack([delta * (delta.abs() >= limit) for delta, limit in zip(deltas, limits, strict=True)])
        else:
            deltas = torch.stack([trim(delta, params.settings.density) for delta in deltas])
        normalize = params.settings.normalize is not False
        return combine(deltas, params.weights, elect=True, normalize=normalize, lam=params.settings.lam)


MERGER = Ties()
