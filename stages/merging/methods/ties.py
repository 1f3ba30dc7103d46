"""ties: trim each task vector to its largest entries, elect a sign per entry, average the entries that agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stages.merging.contract import MergeParams, Merger, blocks
from stages.merging.deltas import combine, kept_count, task_vectors
from stages.merging.magnitudes import global_threshold, histograms
from stages.merging.shared_settings import Normalized, Scaled, Sparse
from stages.records.card import Card
from stages.runtime.validation import Section

if TYPE_CHECKING:
    from torch import Generator, Tensor

_SAMPLE = 1 << 14
"""Entries of a tensor that the search for its smallest kept magnitude starts from."""


def magnitudes(name: str, base: Tensor | None, model: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first entry, |t|) of consecutive blocks of a model's task vector, flattened."""
    for own, origin, parts in blocks(base, [model]):
        yield own.start, task_vectors(name, origin, parts)[0].abs_()


def bounds(sample: Tensor, density: float) -> tuple[float, float]:
    """Two magnitudes that are likely to enclose the smallest one to keep, by a sample of all; [n] float32."""
    ordered = sample.sort(descending=True).values.tolist()
    rank, margin = int(density * len(ordered)), 4 * math.isqrt(len(ordered))
    low, high = rank + margin, rank - margin
    return ordered[low] if low < len(ordered) else 0.0, ordered[high] if high >= 0 else math.inf


@dataclass(frozen=True)
class Trim:
    """What is kept of a flattened task vector: magnitudes above `limit`, and those equal to it before entry `end`."""

    limit: float
    end: int

    @classmethod
    def to_density(cls, name: str, base: Tensor | None, model: Tensor, density: float) -> Trim:
        """Keeps the int(density * n) largest magnitudes; of equal ones the earlier."""
        import numpy as np
        import torch

        keep = kept_count(density, model.numel())
        if not keep:
            return cls(0.0, 0)
        step = max(1, model.numel() // _SAMPLE)
        sample = task_vectors(name, None if base is None else base.reshape(-1)[::step], [model.reshape(-1)[::step]])[0].abs_()
        for low, high in (bounds(sample, density), (0.0, math.inf)):
            above, near, places = 0, [], []
            for start, magnitude in magnitudes(name, base, model):
                values = magnitude.numpy()  # much faster than PyTorch at comparing and at finding the few in between
                larger = values > high
                above += int(np.count_nonzero(larger))
                inside = np.flatnonzero(~(larger | (values <= low)))
                near.append(values[inside])
                places.append(inside + start)
            between = torch.from_numpy(np.concatenate(near)).nan_to_num_(nan=math.inf, posinf=math.inf)
            if above < keep <= above + len(between):
                break
            if not low and keep > above + len(between):  # only zeros are left to keep
                return cls(0.0, 0)
        limit = torch.kthvalue(between, len(between) - (keep - above) + 1).values
        larger_entries = above + int(torch.count_nonzero(between > limit))
        level = np.concatenate(places)[(between == limit).numpy()]
        return cls(float(limit), int(level[keep - larger_entries - 1]) + 1)

    def apply(self, delta: Tensor, start: int) -> None:
        """Zero the entries of `delta` that are trimmed; `delta` holds the entries from `start` on."""
        mask, end = delta.abs(), max(self.end - start, 0)
        mask[:end].ge_(self.limit)
        mask[end:].gt_(self.limit)
        delta.mul_(mask)


class TiesOptions(Section):
    """ties, dare_ties."""

    scope: Literal["global", "tensor"] = "tensor"
    """Whether entries are trimmed over all weights or per tensor."""


class Settings(Normalized, Scaled, Sparse):
    default_normalize: ClassVar[bool] = True
    ties: TiesOptions = TiesOptions()


class Ties(Merger):
    """theta_0 + lam * (mean over the agreeing models of trimmed w_i t_i).

    ties.scope `tensor` trims every tensor on its own; `global` trims the flattened model (needs a first pass).
    """

    card = Card(
        slug="ties",
        title="TIES-Merging",
        paper="Yadav et al., arXiv 2306.01708",
        equation="theta = theta_0 + lam * sum_{i agrees} w_i trim(t_i) / sum_{i agrees} w_i, sign elected by sum_i w_i trim(t_i)",
        assumptions="Small entries of a task vector are redundant; models that disagree in sign interfere.",
        reduces_to="density 1, no sign conflicts, no zeros: linear.",
        tested_by="tests/merging/test_ties.py",
        switch="merge.method: ties",
    )
    needs_base = True
    Settings = Settings
    weighted = True

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams) -> Mapping[str, Any] | None:
        """Histograms of the magnitudes, [N, 2**20] int64, for the global scope; None for the tensor scope."""
        if params.settings.ties.scope == "tensor":
            return None
        return {"magnitudes": histograms(task_vectors(name, base, models))}

    def trims(
        self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeParams, totals: Mapping[str, Any] | None
    ) -> list[Trim]:
        """How each model's task vector of the tensor is trimmed."""
        density = params.settings.density
        if params.settings.ties.scope == "global" and totals is not None:
            limits = [float(global_threshold(counts, density)) for counts in totals["magnitudes"]]
            return [Trim(limit, model.numel()) for limit, model in zip(limits, models, strict=True)]
        return [Trim.to_density(name, base, model, density) for model in models]

    def merge_in_pieces(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Iterator[Tensor]:
        trims, settings = self.trims(name, base, models, params, totals), params.settings
        for own, origin, parts in blocks(base, models):
            deltas = task_vectors(name, origin, parts)
            for delta, trim in zip(deltas, trims, strict=True):
                trim.apply(delta, own.start)
            merged = combine(deltas, params.weights, elect=True, normalize=settings.normalized, lam=settings.lam)
            assert origin is not None
            yield merged.add_(origin.float())

    def merge_tensor(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Tensor:
        import torch

        return torch.cat(list(self.merge_in_pieces(name, base, models, params, rng, totals))).reshape(models[0].shape)


MERGER = Ties()
