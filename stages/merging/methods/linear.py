"""linear: the weighted mean of the models' weights (model soup)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.merging.contract import Merger
from stages.merging.settings import MergeParams, Normalized
from stages.records.card import Card

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Settings(Normalized):
    """null: true."""


class Linear(Merger):
    """theta = sum_i w_i theta_i / sum_i w_i; without the division if merge.normalize is false."""

    card = Card(
        slug="linear",
        title="Linear averaging (model soups)",
        paper="Wortsman et al., arXiv 2203.05482",
        equation="theta = sum_i w_i theta_i / sum_i w_i",
        assumptions="The models share an initialisation and lie in one basin of the loss.",
        reduces_to="One model: that model, bit for bit. Weights 1/N: task arithmetic with weights 1/N.",
        tested_by="tests/merging/test_linear.py",
        switch="merge.method: linear",
    )
    needs_base = False
    Settings = Settings
    weighted = True

    def merge_tensor(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Tensor:
        divisor = 1.0 if params.settings.normalize is False else sum(params.weights)
        # Computing the coefficient first multiplies a single model by exactly 1.
        merged = models[0].float() * (params.weights[0] / divisor)
        for model, weight in zip(models[1:], params.weights[1:], strict=True):
            merged.add_(model.float() * (weight / divisor))
        return merged

    def entrywise(self, params: MergeParams) -> bool:
        return True


MERGER = Linear()
