"""ram_plus: RAM, enlarging the entries that only one agent changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.merging.contract import MergeParams
from stages.merging.deltas import task_vectors
from stages.merging.methods.ram import Ram, changed_masks, enlargement, overlap_counts, thresholds
from stages.records.card import Card

if TYPE_CHECKING:
    from torch import Tensor


class RamPlus(Ram):
    """RAM with unique entries enlarged by l_i; counted over all tensors (ram.scope global, one more pass) or within each."""

    card = Card(
        slug="ram_plus",
        title="RAM+: RAM with unique changes enlarged",
        paper="arXiv 2601.13572",
        equation="as ram, but l_i t_i where c = 1, l_i = 1 + r * clip(shared_i / unique_i, 0, alpha)",
        assumptions="Those of RAM; the more an agent's changes overlap with others', the more its unique ones were diluted.",
        reduces_to="r = 0, disjoint supports, or all entries changed by all: ram.",
        tested_by="tests/merging/test_ram.py",
        switch="merge.method: ram_plus",
    )

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams) -> Mapping[str, Any] | None:
        """`counts`, or the histograms, which have to be known before where eps is a share."""
        return super().scan(name, base, models, params) or self.counts(name, base, models, params, None)

    def scans_again(self, params: MergeParams) -> bool:
        return params.settings.ram.top is not None

    def scan_again(
        self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams, totals: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        return self.counts(name, base, models, params, totals)

    def counts(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        totals: Mapping[str, Any] | None,
    ) -> Mapping[str, Any] | None:
        """Integer counts of one tensor, {shared: [N], unique: [N]}; None for the tensor scope."""
        if params.settings.ram.scope == "tensor":
            return None
        shared, unique = overlap_counts(changed_masks(task_vectors(name, base, models), thresholds(params, totals)))
        return {"shared": shared, "unique": unique}

    def scale(self, deltas: Tensor, params: MergeParams, totals: Mapping[str, Any] | None) -> list[float]:
        if totals is not None and "shared" in totals:
            shared, unique = totals["shared"], totals["unique"]
        else:
            shared, unique = overlap_counts(changed_masks(deltas, thresholds(params, totals)))
        return enlargement(shared, unique, params.settings.ram.r, params.settings.ram.alpha)

    def entrywise(self, params: MergeParams) -> bool:
        return bool(params.settings.ram.scope == "global")

    def scan_report(self, totals: Mapping[str, Any] | None, params: MergeParams, domains: Sequence[str]) -> dict[str, Any]:
        """Counts and enlargement per domain; empty for the tensor scope."""
        if totals is None or "shared" not in totals:
            return {}
        shared, unique = totals["shared"], totals["unique"]
        scale = enlargement(shared, unique, params.settings.ram.r, params.settings.ram.alpha)
        return {
            domain: {"shared": int(shared[i]), "unique": int(unique[i]), "enlargement": scale[i]}
            for i, domain in enumerate(domains)
        }


MERGER = RamPlus()
