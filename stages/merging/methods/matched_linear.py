"""matched_linear: the mean of the task vectors, as long as RAM+'s merged task vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.merging.contract import MergeError, MergeParams
from stages.merging.deltas import combine, task_vectors
from stages.merging.methods.ram import changed_masks, enlargement, thresholds
from stages.merging.methods.ram_plus import RamPlus
from stages.records.card import Card

if TYPE_CHECKING:
    from torch import Generator, Tensor


def mean_delta(deltas: Tensor, weights: Sequence[float]) -> Tensor:
    """sum_i w_i t_i / sum_i w_i: deltas [N, *shape] -> [*shape]."""
    return combine(deltas, weights, elect=False, normalize=True, lam=1.0)


class MatchedLinear(RamPlus):
    """A control for RAM+: whether it gains by more than a longer step from the base."""

    card = Card(
        slug="matched_linear",
        title="Linear averaging with RAM+'s norm",
        paper="ours",
        equation="theta = theta_0 + s mean_i t_i, s = |RAM+'s delta| / |mean_i t_i| over all weights",
        assumptions="None; it separates the length of a merged task vector from its direction.",
        reduces_to="One model, all of whose changes count: that model. All entries changed by all: linear.",
        tested_by="tests/merging/test_matched_linear.py",
        switch="merge.method: matched_linear",
    )

    def check(self, params: MergeParams) -> None:
        if params.settings.ram.scope != "global":
            raise MergeError("merge.ram.scope must be global with merge.method matched_linear: one factor is for all weights")

    def counts(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        totals: Mapping[str, Any] | None,
    ) -> Mapping[str, Any] | None:
        """RAM+'s counts, and squared norms in float64: of its shared entries and the mean (scalars), of unique ones ([N])."""
        import torch

        deltas = task_vectors(name, base, models)
        changed = changed_masks(deltas, thresholds(params, totals))
        count = changed.sum(dim=0)
        weighted = deltas * changed * deltas.new_tensor(params.weights).reshape(-1, *[1] * (deltas.dim() - 1))
        squares = weighted.square().reshape(len(deltas), -1)
        both = weighted.sum(dim=0) / count.clamp(min=1) * (count >= 2)
        return {
            **(super().counts(name, base, models, params, totals) or {}),
            "shared_square": both.square().sum(dtype=torch.float64),
            "unique_square": (squares * (count == 1).reshape(-1)).sum(dim=1, dtype=torch.float64),
            "mean_square": mean_delta(deltas, params.weights).square().sum(dtype=torch.float64),
        }

    def factor(self, totals: Mapping[str, Any], params: MergeParams) -> float:
        """s; 1 where the mean is the base."""
        scale = enlargement(totals["shared"], totals["unique"], params.settings.ram.r, params.settings.ram.alpha)
        unique = sum(factor**2 * float(square) for factor, square in zip(scale, totals["unique_square"], strict=True))
        mean = float(totals["mean_square"])
        return float(params.settings.lam) * ((float(totals["shared_square"]) + unique) / mean) ** 0.5 if mean else 1.0

    def merged_delta(self, deltas: Tensor, params: MergeParams, rng: Generator, totals: Mapping[str, Any] | None) -> Tensor:
        assert totals is not None
        return mean_delta(deltas, params.weights).mul_(self.factor(totals, params))

    def scan_report(self, totals: Mapping[str, Any] | None, params: MergeParams, domains: Sequence[str]) -> dict[str, Any]:
        return {**super().scan_report(totals, params, domains), "factor": self.factor(totals or {}, params)}


MERGER = MatchedLinear()
