"""The contract of every merge method: tensors stream by name, one at a time; deltas are float32.

A method is a `Merger`: an optional `scan` (first pass, integers or small sums only) and `merge_tensor` (second pass). Its module
imports torch inside functions, since params.yaml is checked with `Settings`.
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
    """Optional: `told(totals, params, domains) -> dict` (what the first pass found, for reports/merge.json) and
    `warnings(params, changed) -> list[str]` (`changed`: domain -> share of its weights that differ from the base's)."""

    card: Card
    Settings: type[Section]
    """Keys that the method reads beside the weights."""
    weighted: bool
    """Whether it reads `merge.weights`."""
    needs_base: bool

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams) -> Mapping[str, Any] | None:
        """Statistics of one tensor, added up over all tensors before the second pass; None if the method has no first pass."""
        ...

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
