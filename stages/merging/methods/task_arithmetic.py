"""task_arithmetic: the base plus the weighted sum of task vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stages.merging.contract import MergeParams
from stages.merging.deltas import DeltaMethod, combine
from stages.merging.shared_settings import Normalized, Scaled
from stages.records.card import Card

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Settings(Normalized, Scaled):
    """Those of params.yaml's section `merge`."""


class TaskArithmetic(DeltaMethod):
    """theta = theta_0 + lam sum_i w_i (theta_i - theta_0); divided by sum_i w_i where merge.normalize is true."""

    card = Card(
        slug="task_arithmetic",
        title="Task arithmetic",
        paper="Ilharco et al., arXiv 2212.04089",
        equation="theta = theta_0 + lam * sum_i w_i (theta_i - theta_0)",
        assumptions="Task vectors add up without interfering much.",
        reduces_to="normalize: true and lam 1: linear.",
        tested_by="tests/merging/test_task_arithmetic.py",
        switch="merge.method: task_arithmetic",
    )
    Settings = Settings

    def merged_delta(self, deltas: Tensor, params: MergeParams, rng: Generator, totals: Mapping[str, Any] | None) -> Tensor:
        return combine(deltas, params.weights, elect=False, normalize=params.settings.normalized, lam=params.settings.lam)

    def entrywise(self, params: MergeParams) -> bool:
        return True


MERGER = TaskArithmetic()
