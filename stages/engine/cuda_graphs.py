"""Decoding passes as CUDA graphs: recorded once per shape, then replayed, so that a small model is not bound by kernel launches.

A decoding pass has one token per row, rows and the length that attention reads are rounded up by the engine, so few shapes occur.
What changes from step to step (tokens, positions, masks, where windows begin) lies in tensors that stay where they are and are
written over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stages.engine.cache import SlotCache, View
from stages.engine.decoder import Forward, LeanForward, Pass, StockForward, serves

WARM_UPS = 3
"""Runs before a recording, as PyTorch asks for: libraries set up their work space in them."""

Shape = tuple[int, tuple[tuple[int, int, bool], ...]]
"""Tokens; for each view its length, its first column, and whether each row has a first column of its own."""
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Takes a function without arguments; returns what runs it again, and the tensor that then holds its result."""


def record_cuda(function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """`function` as a CUDA graph on the current device."""
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
    """`Forward` that replays decoding passes, and runs all others as they are."""

    def __init__(self, forward: Forward, record: Record = record_cuda) -> None:
        self._forward, self._record = forward, record
        self._recorded: dict[Shape, tuple[Pass, Callable[[], Any], Tensor]] = {}

    def refresh(self) -> None:
        self._forward.refresh()

    def __call__(self, batch: Pass) -> Tensor:
        (part, *others) = batch.parts
        if others or part.place is not None or batch.ends is not None:
            return self._forward(batch)
        shape = (len(batch.ids), tuple((view.mask.shape[-1], view.start, view.places is not None) for view in part.views))
        if shape not in self._recorded:
            # The warm-up writes the same keys and values to the same places as the pass itself.
            fixed = replace(
                batch,
                ids=batch.ids.clone(),
                targets=batch.targets.clone(),
                positions=batch.positions.clone(),
                parts=[replace(part, views=tuple(copied(view) for view in part.views))],
            )
            self._recorded[shape] = (fixed, *self._record(lambda: self._forward(fixed)))
        fixed, replay, result = self._recorded[shape]
        for name in ("ids", "targets", "positions"):
            getattr(fixed, name).copy_(getattr(batch, name))
        for held, view in zip(fixed.parts[0].views, part.views, strict=True):
            held.mask.copy_(view.mask)
            if held.places is not None and view.places is not None:
                held.places.copy_(view.places)
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
