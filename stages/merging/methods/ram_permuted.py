"""ram_permuted: RAM+ without knowledge of which entries other agents changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stages.merging.contract import MergeParams
from stages.merging.methods.ram import changed_masks, thresholds
from stages.merging.methods.ram_plus import RamPlus
from stages.records.card import Card

if TYPE_CHECKING:
    from torch import Generator, Tensor


class RamPermuted(RamPlus):
    """A control for RAM+: each model's factors, l_i where it alone changed an entry and 1 / c where c models did, stand at random
    places among the entries of a tensor that it changed."""

    card = Card(
        slug="ram_permuted",
        title="RAM+ with permuted factors",
        paper="ours",
        equation="delta = sum_i m_i f_i t_i, f_i a permutation of RAM+'s factors over the entries of the tensor with m_i = 1",
        assumptions="None; it separates RAM+'s use of overlap from the sizes of its factors.",
        reduces_to="One model, disjoint supports, or all entries changed by all: ram_plus.",
        tested_by="tests/merging/test_ram_permuted.py",
        switch="merge.method: ram_permuted",
    )

    def merged_delta(self, deltas: Tensor, params: MergeParams, rng: Generator, totals: Mapping[str, Any] | None) -> Tensor:
        import torch

        changed = changed_masks(deltas, thresholds(params, totals))
        count, merged = changed.sum(dim=0), torch.zeros_like(deltas[0])
        factors = self.scale(deltas, params, totals)
        for delta, own, weight, factor in zip(deltas, changed, params.weights, factors, strict=True):
            among = count[own]
            factor_of = torch.where(among == 1, factor, 1.0 / among)
            merged[own] += weight * delta[own] * factor_of[torch.randperm(len(among), generator=rng)]
        return merged.mul_(params.settings.lam)

    def entrywise(self, params: MergeParams) -> bool:
        return False


MERGER = RamPermuted()
