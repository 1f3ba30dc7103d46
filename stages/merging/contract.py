"""The contract of every merge method: tensors stream by name, one at a time; deltas are float32.

A method is a `Merger`: an optional `scan` (first pass, integers or small sums only) and `merge_tensor` (second pass).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Generator, Tensor

from stages.algorithms.card import Card


class Merger(Protocol):
    card: Card
    needs_base: bool

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: Any) -> Mapping[str, Any] | None:
        """Statistics of one tensor, added up over all tensors before the second pass; None if the method has no first pass."""
        ...

    def merge_tensor(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: Any,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Tensor:
        """The merged tensor, float32, shape of its inputs. `rng` is seeded from (seed, method, tensor name) by the streamer; a
        method that draws per model draws in model order."""
        ...
