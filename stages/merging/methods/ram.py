"""ram: average the entries several agents changed, keep those only one agent changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from stages.merging.contract import CHANGE, MergeParams
from stages.merging.deltas import DeltaMethod, task_vectors
from stages.merging.magnitudes import global_threshold, histograms
from stages.merging.overlap import chance_lift
from stages.merging.shared_settings import Scaled
from stages.records.card import Card
from stages.runtime.validation import NonNegative, Positive, Section

if TYPE_CHECKING:
    from torch import Generator, Tensor


FEW_CHANGES = 0.1
"""Fraction of changed entries below which the method warns."""
NEARLY_ALL = 0.95
"""Fraction of a model's changes from which a lower threshold would hardly add any."""
BY_CHANCE = 1.1
"""Overlap of two models' changes, relative to that of independent ones, up to which the method warns."""


def changed_masks(deltas: Tensor, eps: Sequence[float]) -> Tensor:
    """m: [N, *shape] bool, true where |t_i| > eps_i."""
    return deltas.abs() > deltas.new_tensor(eps).reshape(-1, *[1] * (deltas.dim() - 1))


def overlap_counts(changed: Tensor) -> tuple[Tensor, Tensor]:
    """(shared, unique), both [N] int64: entries model i changed that others changed too, and those it changed alone."""
    count = changed.sum(dim=0)
    shared, unique = ((changed & own).reshape(len(changed), -1).sum(dim=1) for own in (count >= 2, count == 1))
    return shared, unique


def enlargement(shared: Tensor, unique: Tensor, r: float, alpha: float) -> list[float]:
    """l_i = 1 + r * clip(shared_i / unique_i, 0, alpha), one per model; 1 for a model without unique entries."""
    counts = zip(shared.tolist(), unique.tolist(), strict=True)
    return [1.0 + r * min(both / alone, alpha) if alone else 1.0 for both, alone in counts]


def merge_deltas(deltas: Tensor, params: MergeParams, scale: Sequence[float], eps: Sequence[float]) -> Tensor:
    """deltas [N, *shape], overwritten -> [*shape]: 0 where no model changed, l_i w_i t_i where one did, mean of w_i t_i where
    several did."""
    # Model by model and in place, because memory traffic dominates the cost; in float32, as comparisons to bool are slower.
    import torch

    total = torch.zeros_like(deltas[0])
    enlarged = torch.zeros_like(total) if any(factor != 1.0 for factor in scale) else None
    count = torch.zeros_like(total)
    for delta, weight, factor, threshold in zip(deltas, params.weights, scale, eps, strict=True):
        weighted = torch.hardshrink(delta, threshold)
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
    """ram, ram_plus and their controls."""

    eps: Positive | Annotated[str, Field(pattern=r"^(100|\d{1,2}(\.\d+)?)%$")] = CHANGE
    """Smaller changes of a weight count as none; a share such as 10% counts each model's largest changes."""
    r: NonNegative = 0.1
    """ram_plus: unique changes are scaled by 1 + r clip(shared / unique, 0, alpha)."""
    alpha: NonNegative = 1.0
    """ram_plus: upper limit of the ratio shared / unique."""
    scope: Literal["global", "tensor"] = "global"
    """Whether overlap is measured over all weights or per tensor."""

    @field_validator("eps")
    @classmethod
    def _counts_some(cls, value: float | str) -> float | str:
        if isinstance(value, str) and float(value.removesuffix("%")) == 0:
            raise ValueError(f"{value} of the weights would count as changed, which is none: give a share above 0, such as 10%")
        return value

    @property
    def top(self) -> float | None:
        """The share of each model's weights that counts as changed, if `eps` is one."""
        return float(self.eps.removesuffix("%")) / 100 if isinstance(self.eps, str) else None


class Settings(Scaled):
    ram: RamOptions = RamOptions()


def thresholds(params: MergeParams, totals: Mapping[str, Any] | None) -> list[float]:
    """eps_i, one per model: `ram.eps`, or just below the smallest magnitude among its largest changes."""
    options = params.settings.ram
    if options.top is None:
        return [float(options.eps)] * len(params.weights)
    assert totals is not None
    import torch

    limits = torch.stack([global_threshold(counts, options.top) for counts in totals["magnitudes"]])
    return torch.nextafter(limits, torch.zeros_like(limits)).tolist()  # type: ignore[no-any-return]


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

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams) -> Mapping[str, Any] | None:
        """Histograms of the magnitudes, [N, 2**20] int64, where eps is a share; else there is nothing to count."""
        if params.settings.ram.top is None:
            return None
        return {"magnitudes": histograms(task_vectors(name, base, models))}

    def scale(self, deltas: Tensor, params: MergeParams, totals: Mapping[str, Any] | None) -> list[float]:
        """l_i, one per model: the factor for entries that only model i changed."""
        return [1.0] * deltas.shape[0]

    def merged_delta(self, deltas: Tensor, params: MergeParams, rng: Generator, totals: Mapping[str, Any] | None) -> Tensor:
        return merge_deltas(deltas, params, self.scale(deltas, params, totals), thresholds(params, totals))

    def entrywise(self, params: MergeParams) -> bool:
        return True

    def change_thresholds(self, params: MergeParams, totals: Mapping[str, Any] | None) -> list[float]:
        return thresholds(params, totals)

    def warnings(self, params: MergeParams, diagnostics: Mapping[str, Any]) -> list[str]:
        """Warns of specialists whose changes are mostly ignored, and of changed weights that overlap as by chance."""
        options, said = params.settings.ram, []
        remedy = "raise that share" if options.top is not None else "lower it, or set a share of the weights, such as 30%"
        for domain, one in diagnostics["models"].items():
            share, unchanged = one["changed_fraction"], one["sparsity"]
            if share is None or share >= FEW_CHANGES:
                continue
            if share >= NEARLY_ALL * (1 - unchanged):
                said.append(
                    f"only {1 - unchanged:.1%} of rl@{domain}'s weights changed, nearly all of which count; if the merged model "
                    "lacks its gains, train it longer or with a larger rl.sparse.share"
                )
            else:
                said.append(
                    f"with merge.ram.eps {options.eps} only {share:.1%} of rl@{domain}'s weights count as changed, so it "
                    f"contributes little to the merged model; {remedy}"
                )
        for pair in diagnostics["pairs"]:
            lift = chance_lift(diagnostics, pair["a"], pair["b"])
            if lift is not None and lift < BY_CHANCE:
                said.append(
                    f"the weights that rl@{pair['a']} and rl@{pair['b']} changed overlap as by chance ({lift:.2f} times it), "
                    "so their overlap tells little about which changes matter to both"
                )
        return said


MERGER = Ram()
