"""The contract of merge methods: tensors are streamed by name, one at a time; deltas are float32.

A method is a `Merger`: its settings and what it checks of them, optional passes for statistics (`scan`, and `scan_again` where
they need those of the first; integers or small sums only) and `merge_tensor` (last pass). Its module imports torch inside
functions, because checking params.yaml imports its `Settings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stages.records.card import Card
from stages.runtime.validation import Section

if TYPE_CHECKING:
    from torch import Generator, Tensor

CHANGE = 1e-3
"""Smaller changes of a weight count as none in a merge's diagnostics, unless the method has a threshold of its own."""
BLOCK = 1 << 16
"""Entries per block, so that a block of every input and the temporaries fit the cores' second-level caches."""


class MergeError(ValueError):
    """Models that cannot be merged, or a setting that the method does not use."""


@dataclass(frozen=True)
class MergeParams:
    """A method's parameters: one weight per model, its `Settings`, and the number of layers, for gradients over depth."""

    weights: tuple[float, ...]
    settings: Any
    layers: int = 1


def blocks(
    base: Tensor | None, models: Sequence[Tensor], size: int = BLOCK
) -> Iterator[tuple[slice, Tensor | None, list[Tensor]]]:
    """(entries, base, models) of consecutive blocks of a tensor, flattened; the last has size to 2 size - 1 entries, if any."""
    whole = models[0].numel()
    starts = range(0, max(whole - size + 1, 1), size)
    for start in starts:
        own = slice(start, whole if start == starts[-1] else start + size)
        yield own, None if base is None else base.reshape(-1)[own], [model.reshape(-1)[own] for model in models]


class Merger(Protocol):
    """A merge method. Only `card`, `Settings`, `weighted`, `needs_base` and `merge_tensor` have no default."""

    card: Card
    Settings: type[Section]
    """The method's settings besides the weights."""
    weighted: bool
    """Whether it reads `merge.weights`."""
    needs_base: bool
    trains: bool = False
    """Whether the stage merge trains the merged model on episodes (shipped methods only); `merge_tensor` is never called."""
    from_specialists: bool = True
    """Whether the merged model comes from the specialists, or from where they started."""
    became: str = " and merged into one generalist"
    """How the merged model came to be: the end of a sentence on the specialists, for the report."""

    def check(self, params: MergeParams) -> None:
        """Raise MergeError for settings that do not fit together or the number of models (`len(params.weights)`). Called when
        params.yaml is checked, and before a merge."""

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams) -> Mapping[str, Any] | None:
        """Statistics of one tensor, summed over all tensors before the next pass; None for methods of one pass."""
        return None

    def scans_again(self, params: MergeParams) -> bool:
        """Whether there is a second pass for statistics."""
        return False

    def scan_again(
        self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams, totals: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Further statistics of one tensor, which need the sums of `scan`; their sums are added to `totals`."""
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

    def entrywise(self, params: MergeParams) -> bool:
        """Whether an entry of the merged tensor depends only on `totals` and the same entry of the inputs."""
        return False

    def merge_in_pieces(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Iterator[Tensor]:
        """The values of `merge_tensor` in consecutive pieces: blocks if the method is `entrywise`, else the whole tensor."""
        if self.entrywise(params):
            for _, origin, parts in blocks(base, models):
                yield self.merge_tensor(name, origin, parts, params, rng, totals)
        else:
            yield self.merge_tensor(name, base, models, params, rng, totals)

    def change_thresholds(self, params: MergeParams, totals: Mapping[str, Any] | None) -> list[float]:
        """Per model: changes of a weight up to this count as none in the merge's diagnostics."""
        return [CHANGE] * len(params.weights)

    def warnings(self, params: MergeParams, diagnostics: Mapping[str, Any]) -> list[str]:
        """What to warn of after a merge, by its diagnostics (`stages.merging.diagnostics.measure`)."""
        return []

    def scan_report(self, totals: Mapping[str, Any] | None, params: MergeParams, domains: Sequence[str]) -> dict[str, Any]:
        """Results of the passes for statistics, from their sums, for reports/merge.json."""
        return {}
