"""Decoding passes as CUDA graphs: captured once per shape, then replayed, so that a small model is not bound by kernel launches.

A decoding pass has one token per row; the engine rounds up rows and attention lengths, so few shapes occur. What changes from
step to step (tokens, positions, masks, windows' starts) is copied into static tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stages.engine.cache import SlotCache, View
from stages.engine.decoder import LeanForward, serves
from stages.engine.forward import Forward, Pass, StockForward

WARM_UPS = 3
"""Runs before a capture, as PyTorch requires: libraries allocate workspaces in them."""

Shape = tuple[int, tuple[tuple[int, int, bool], ...]]
"""Tokens; for each view its length, its first column, and whether each row has its own first column."""
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Captures a function; returns the function that replays it, and the tensor that then holds the result."""


def record_cuda(function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """Capture `function` as a CUDA graph on the current device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph.replay, result


class GraphedForward:
    """A `Forward` that replays decoding passes as graphs and runs all others directly."""

    def __init__(self, forward: Forward, record: Record = record_cuda) -> None:
        self._forward, self._record = forward, record
        self._recorded: dict[Shape, tuple[Pass, Callable[[], Any], Tensor]] = {}

    def refresh(self) -> None:
        self._forward.refresh()

    def beside(self, model: Any) -> GraphedForward:
        return GraphedForward(self._forward.beside(model), self._record)

    def __call__(self, batch: Pass) -> Tensor:
        (part, *others) = batch.parts
        if others or part.place is not None or batch.ends is not None:
            return self._forward(batch)
        shape = (len(batch.ids), tuple((view.mask.shape[-1], view.start, view.places is not None) for view in part.views))
        if shape not in self._recorded:
            # Warm-up runs are harmless: they write the same keys and values to the same places as the pass itself.
            static = replace(
                batch,
                ids=batch.ids.clone(),
                targets=batch.targets.clone(),
                positions=batch.positions.clone(),
                parts=[replace(part, views=tuple(copied(view) for view in part.views))],
            )
            self._recorded[shape] = (static, *self._record(lambda: self._forward(static)))
        static, replay, result = self._recorded[shape]
        for name in ("ids", "targets", "positions"):
            getattr(static, name).copy_(getattr(batch, name))
        for target, view in zip(static.parts[0].views, part.views, strict=True):
            target.mask.copy_(view.mask)
            if target.places is not None and view.places is not None:
                target.places.copy_(view.places)
        replay()
        return result.clone()


def copied(view: View) -> View:
    return replace(view, mask=view.mask.clone(), places=None if view.places is None else view.places.clone())


def make_forward(model: Any, cache: SlotCache) -> Forward:
    """The fastest forward pass for `model`."""
    if not serves(model):
        return StockForward(model, cache)
    lean = LeanForward(model, cache)
    return GraphedForward(lean) if cache.data.device.type == "cuda" else lean
