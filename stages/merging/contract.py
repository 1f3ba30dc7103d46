"""The contract of merge methods: tensors are streamed by name, one at a time; deltas are float32.

A method is a `Merger`: an optional `scan` (first pass, integers or small sums only) and `merge_tensor` (second pass). Its module
imports torch inside functions, because checking params.yaml imports its `Settings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stages.merging.settings import MergeParams
from stages.records.card import Card
from stages.runtime.validation import Section

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Merger(Protocol):
    """Optional: `scan_report(totals, params, domains) -> dict` (results of the first pass, for reports/merge.json) and
    `warnings(params, changed) -> list[str]` (`changed`: domain -> share of its weights that differ from the base's)."""

    card: Card
    Settings: type[Section]
    """The method's settings besides the weights."""
    weighted: bool
    """Whether it reads `merge.weights`."""
    needs_base: bool

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams) -> Mapping[str, Any] | None:
        """Statistics of one tensor, summed over all tensors before the second pass; None for methods of one pass."""
        return None

    def merge_tensor(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Tensor:
        """The merged tensor, float32, shape of its inputs. `rng` is seeded from (seed, method, tensor name) by the streamer; a
        method that draws per model draws in model order."""
        ...
