"""A forward pass of the torch engine, and the model's own layers as the way to run it (stages/engine/decoder.py is the other)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from stages.engine.cache import ATTENTION, SlotCache, View, attend, reading


@dataclass(frozen=True)
class Part:
    """Rows of a pass that attend together: n rows with at most Q new tokens each."""

    rows: Tensor | slice
    """Rows of the cache, [n] or a slice (which avoids a copy)."""
    views: tuple[View, ...]
    """One for layers of each kind (`SlotCache.kinds`)."""
    start: int
    stop: int
    """Range of the rows' tokens in the pass's [T]."""
    place: Tensor | None = None
    """[stop - start] index of each token in the flattened [n, Q]. None: one token per row, in order."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, Q)."""
        mask = self.views[0].mask
        return mask.shape[0], mask.shape[2]


@dataclass(frozen=True)
class Pass:
    """T new tokens of some rows, without padding; only attention separates rows."""

    ids: Tensor
    """[T] token ids."""
    targets: Tensor
    """[T] rows of the cache that keys and values are written to."""
    positions: Tensor
    """[T] positions in these rows."""
    parts: list[Part]
    """Tokens after those of the last part are padding."""
    ends: Tensor | None = None
    """[n] indices of the output tokens: one for each row of each part, then padding. The last layer computes only these. None:
    all tokens."""


class Forward(Protocol):
    """The model's layers over a `SlotCache`."""

    def __call__(self, batch: Pass) -> Tensor:
        """Hidden states [n, D] of the pass's output tokens, after the final norm."""
        ...

    def refresh(self) -> None:
        """Update copies of the model's weights, which may have changed."""
        ...

    def beside(self, model: Any) -> Forward:
        """The pass of a model that differs from this one's in its adapters alone, over the same cache."""
        ...


class StockForward:
    """The Hugging Face model's own layers, with attention that reads the slot cache in place."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self.model, self.cache = model, cache

    def refresh(self) -> None:
        return None

    def beside(self, model: Any) -> StockForward:
        return StockForward(model, self.cache)

    def __call__(self, batch: Pass) -> Tensor:
        config = self.model.config
        original = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            with reading(self.cache), patched_attention(self.model, self.cache):
                hidden = torch.cat([self._part(batch, part) for part in batch.parts])
        finally:
            config._attn_implementation = original
        return hidden if batch.ends is None else hidden[batch.ends]

    def _part(self, batch: Pass, part: Part) -> Tensor:
        """Hidden states of a part's tokens, which the model needs padded."""
        (rows, queries), own = part.shape, slice(part.start, part.stop)
        place = torch.arange(rows, device=batch.ids.device) if part.place is None else part.place
        ids, positions = (
            batch.ids.new_zeros(rows * queries).index_copy(0, place, of[own]) for of in (batch.ids, batch.positions)
        )
        self.cache.aim(batch.targets[own], batch.positions[own])
        self.cache.look(part.rows, part.views, place)
        output = self.model.base_model(
            input_ids=ids.view(rows, queries),
            attention_mask=part.views[0].mask,  # not used by `grouped_attention`; passed so that the model builds none
            position_ids=positions.view(rows, queries),
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state.flatten(0, 1)[place]


@contextmanager
def patched_attention(model: Any, cache: SlotCache) -> Iterator[None]:
    """Make GPT-Neo's layers, which bypass transformers' attention interface, attend with the cache's masks."""
    modules = [block.attn.attention for block in model.base_model.h] if model.config.model_type == "gpt_neo" else []

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: object) -> tuple[Tensor, None]:
        return attend(query.float(), key.float(), value.float(), cache.mask(layer)).to(value.dtype), None

    for module in modules:
        module._attn = partial(attention, module.layer_id)
    try:
        yield
    finally:
        for module in modules:
            del module._attn
