"""ram: average the entries several agents changed, keep those only one agent changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from stages.merging.contract import CHANGE, MergeParams
from stages.merging.deltas import DeltaMethod
from stages.merging.shared_settings import Scaled
from stages.records.card import Card
from stages.runtime.validation import NonNegative, Positive, Section

if TYPE_CHECKING:
    from torch import Generator, Tensor


FEW_CHANGES = 0.01
"""Fraction of changed entries below which the method warns."""


def changed_masks(deltas: Tensor, eps: float) -> Tensor:
    """m: [N, *shape] bool, true where |t_i| > eps."""
    return deltas.abs() > eps


def overlap_counts(changed: Tensor) -> tuple[Tensor, Tensor]:
    """(shared, unique), both [N] int64: entries model i changed that others changed too, and those it changed alone."""
    count = changed.sum(dim=0)
    shared, unique = ((changed & own).reshape(len(changed), -1).sum(dim=1) for own in (count >= 2, count == 1))
    return shared, unique


def enlargement(shared: Tensor, unique: Tensor, r: float, alpha: float) -> list[float]:
    """l_i = 1 + r * clip(shared_i / unique_i, 0, alpha), one per model; 1 for a model without unique entries."""
    counts = zip(shared.tolist(), unique.tolist(), strict=True)
    return [1.0 + r * min(both / alone, alpha) if alone else 1.0 for both, alone in counts]


def merge_deltas(deltas: Tensor, params: MergeParams, scale: Sequence[float]) -> Tensor:
    """deltas [N, *shape], overwritten -> [*shape]: 0 where no model changed, l_i w_i t_i where one did, mean of w_i t_i where
    several did."""
    # Model by model and in place, because memory traffic dominates the cost; in float32, as comparisons to bool are slower.
    import torch

    total = torch.zeros_like(deltas[0])
    enlarged = torch.zeros_like(total) if any(factor != 1.0 for factor in scale) else None
    count = torch.zeros_like(total)
    for delta, weight, factor in zip(deltas, params.weights, scale, strict=True):
        weighted = torch.hardshrink(delta, params.settings.ram.eps)
        count += torch.ne(weighted, 0, out=delta)
        if weight != 1.0:
            weighted *= weight
        total += weighted
        if enlarged is not None:
            enlarged.add_(weighted, alpha=factor)
    merged = total.div_(torch.clamp(count, min=1))
    if enlarged is not None:
        merged = torch.where(count == 1, enlarged, merged)
    return merged.mul_(params.settings.lam)


class RamOptions(Section):
    """ram, ram_plus."""

    eps: Positive = CHANGE
    """Smaller changes of a weight count as none."""
    r: NonNegative = 0.1
    """ram_plus: unique changes are scaled by 1 + r clip(shared / unique, 0, alpha)."""
    alpha: NonNegative = 1.0
    """ram_plus: upper limit of the ratio shared / unique."""
    scope: Literal["global", "tensor"] = "global"
    """Whether overlap is measured over all weights or per tensor."""


class Settings(Scaled):
    ram: RamOptions = RamOptions()


class Ram(DeltaMethod):
    """theta_0 + delta; delta = mean of the changes over the agents that changed the entry (the paper's has w_i = lam = 1)."""

    card = Card(
        slug="ram",
        title="RAM: behaviour knowledge merge for reinforced agents",
        paper="arXiv 2601.13572",
        equation="delta = sum_i m_i t_i / c, c = sum_i m_i, m_i = 1[|t_i| > eps]; 0 where c = 0",
        assumptions="RL leaves sparse task vectors that differ between agents; with dense ones it is the mean of deltas.",
        reduces_to="One model or disjoint supports: task arithmetic with weight 1. All entries changed by all: linear.",
        tested_by="tests/merging/test_ram.py",
        switch="merge.method: ram",
    )
    Settings = Settings

    def scale(self, deltas: Tensor, params: MergeParams, totals: Mapping[str, Any] | None) -> list[float]:
        """l_i, one per model: the factor for entries that only model i changed."""
        return [1.0] * deltas.shape[0]

    def merged_delta(self, deltas: Tensor, params: MergeParams, rng: Generator, totals: Mapping[str, Any] | None) -> Tensor:
        return merge_deltas(deltas, params, self.scale(deltas, params, totals))

    def entrywise(self, params: MergeParams) -> bool:
        return True

    def change_threshold(self, params: MergeParams) -> float:
        return float(params.settings.ram.eps)

    def warnings(self, params: MergeParams, changed: Mapping[str, float | None]) -> list[str]:
        """Warns if nearly all of a specialist's changes are at most eps, and so are ignored."""
        return [
            f"with merge.ram.eps {params.settings.ram.eps:g} only {share:.1%} of rl@{domain}'s weights count as changed, so it "
            "hardly contributes to the merged model; lower merge.ram.eps"
            for domain, share in changed.items()
            if share is not None and share < FEW_CHANGES
        ]


MERGER = Ram()
