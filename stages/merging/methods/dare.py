"""dare: drop entries of each task vector at random, rescale the rest, then add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from stages.merging.contract import MergeParams
from stages.merging.deltas import DeltaMethod, combine
from stages.merging.shared_settings import Normalized, Scaled, Sparse
from stages.records.card import Card

if TYPE_CHECKING:
    from torch import Generator, Tensor


def rescale_kept(delta: Tensor, mask: Tensor, density: float, rescale: str) -> Tensor:
    """`delta` where `mask`, else 0, rescaled by 1/density, to the tensor's original L1 norm, or not at all."""
    kept = delta * mask
    if rescale == "inverse_density":
        return kept / density
    if rescale == "l1":
        norm = kept.abs().sum()
        return kept * (delta.abs().sum() / norm) if norm > 0 else kept
    return kept


def drop_at_random(deltas: Tensor, params: MergeParams, rng: Generator) -> Tensor:
    """deltas [N, *shape] with every entry kept with probability `density`, drawn model by model from one generator."""
    import torch

    density, rescale = params.settings.density, params.settings.rescale
    masks = (torch.rand(delta.shape, generator=rng) < density for delta in deltas)
    return torch.stack([rescale_kept(delta, mask, density, rescale) for delta, mask in zip(deltas, masks, strict=True)])


class Settings(Normalized, Scaled, Sparse):
    rescale: Literal["inverse_density", "l1", "none"] = "inverse_density"
    """How kept entries are scaled up: by 1 / density, to the same L1 norm, or not."""


class Dare(DeltaMethod):
    """theta_0 + lam sum_i w_i d_i, where d_i keeps entries of t_i with probability p = density and divides them by p."""

    card = Card(
        slug="dare",
        title="DARE",
        paper="Yu et al., arXiv 2311.03099",
        equation="theta = theta_0 + lam * sum_i w_i (m_i * t_i) / p, m_i ~ Bernoulli(p)",
        assumptions="Deltas are small and redundant, as after supervised tuning; l1 rescaling is biased.",
        reduces_to="density 1: task arithmetic. In expectation (inverse_density): task arithmetic.",
        tested_by="tests/merging/test_dare.py",
        switch="merge.method: dare",
    )
    Settings = Settings
    elect = False

    def merged_delta(self, deltas: Tensor, params: MergeParams, rng: Generator, totals: Mapping[str, Any] | None) -> Tensor:
        deltas = drop_at_random(deltas, params, rng)
        settings = params.settings
        return combine(deltas, params.weights, elect=self.elect, normalize=settings.normalized, lam=settings.lam)


MERGER = Dare()
