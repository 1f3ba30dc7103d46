"""linear: the weighted mean of the models' weights (model soup)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from stages.merging.contract import MergeParams, Merger
from stages.merging.shared_settings import Normalized
from stages.records.card import Card

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Settings(Normalized):
    default_normalize: ClassVar[bool] = True


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
        divisor = sum(params.weights) if params.settings.normalized else 1.0
        # Computing the coefficient first multiplies a single model by exactly 1.
        merged = models[0].float() * (params.weights[0] / divisor)
        for model, weight in zip(models[1:], params.weights[1:], strict=True):
            merged.add_(model.float() * (weight / divisor))
        return merged

    def entrywise(self, params: MergeParams) -> bool:
        return True


MERGER = Linear()
