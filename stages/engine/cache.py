"""A preallocated key/value cache with one row per slot, behind Hugging Face's `Cache` interface, and attention that reads it.

Before each forward pass, `aim` sets the rows and positions of the new tokens; `store` then scatters their keys and values, and
`read` returns what attention reads in a layer; `update` does both for a Hugging Face model. Rows have different lengths: masks
and position ids come from the engine, and a layer with a sliding window has its own mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

SUM_BLOCK = 128
"""Positions that attention sums in one matrix product on a CPU."""


@dataclass(frozen=True)
class View:
    """The columns of the cache that layers of one kind read for n rows, and the mask of each new token over them."""

    mask: Tensor
    """[n, 1, Q, length], added to attention's scores."""
    start: int = 0
    """The first column, if it is the same for all rows."""
    places: Tensor | None = None
    """[n * kv_heads * length] indices into a layer's keys (and values), if each row has its own first column."""


class SlotCache(Cache):
    """`data`: [layers, 2 (keys, values), slots + 1, kv_heads, capacity, head_dim]; padding is written to the last row.

    windows: per layer, how many positions a token attends to; None for all. `kinds`: the distinct windows; `kind_of`: each
    layer's index in `kinds`.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__(layers=[])
        windows = [None if window is None or window >= capacity else window for window in windows or [None] * layers]
        self.kinds = list(dict.fromkeys(windows))
        self.kind_of = [self.kinds.index(window) for window in windows]
        self.slots, self.kv_heads, self.capacity, self.head_dim = slots, kv_heads, capacity, head_dim
        # Zeros, not garbage: masked positions get weight 0, and 0 times NaN would still be NaN.
        self.data = torch.zeros(layers, 2, slots + 1, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self._flat = self.data.view(layers, -1, head_dim)
        self._values_start = (slots + 1) * kv_heads * capacity
        self._heads = torch.arange(kv_heads, device=device)
        self._targets = torch.zeros(0, dtype=torch.long, device=device)
        self._rows: Tensor | slice = slice(0, 0)
        self._views: Sequence[View] = ()
        self._place = self._targets

    def aim(self, rows: Tensor, positions: Tensor) -> None:
        """Set where the next pass's T new tokens are written: rows and positions [T] int64."""
        # [T, 2, kv_heads]: keys, then values.
        index = (rows[:, None] * self.kv_heads + self._heads) * self.capacity + positions[:, None]
        self._targets = torch.stack([index, index + self._values_start], 1).flatten()

    def store(self, states: Tensor, layer_idx: int) -> None:
        """Write states [T, 2 kv_heads, head_dim], keys before values, to the rows and positions set by `aim`."""
        self._flat[layer_idx].index_copy_(0, self._targets, states.reshape(-1, self.head_dim))

    def read(self, rows: Tensor | slice, view: View, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values [N, kv_heads, length, head_dim] of N rows: [N] int64, or a slice, which avoids a copy."""
        length = view.mask.shape[-1]
        if view.places is not None:
            halves = self.data[layer_idx].view(2, -1, self.head_dim)
            shape = (view.mask.shape[0], self.kv_heads, length, self.head_dim)
            return halves[0].index_select(0, view.places).view(shape), halves[1].index_select(0, view.places).view(shape)
        keys, values = (self.data[layer_idx, part, :, :, view.start : view.start + length] for part in (0, 1))
        if isinstance(rows, slice):
            return keys[rows], values[rows]
        return keys.index_select(0, rows), values.index_select(0, rows)

    def places(self, rows: Tensor | slice, starts: Tensor, length: int) -> Tensor:
        """`View.places` of N rows that each read `length` columns from `starts` [N]; columns are clamped to the last one."""
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=starts.device)
        columns = (starts[:, None] + torch.arange(length, device=starts.device)).clamp_(max=self.capacity - 1)
        return ((rows[:, None] * self.kv_heads + self._heads)[:, :, None] * self.capacity + columns[:, None]).flatten()

    def look(self, rows: Tensor | slice, views: Sequence[View], place: Tensor) -> None:
        """Set what `update` reads in layers of each kind, and the indices [T] of the padded tokens that it stores."""
        self._rows, self._views, self._place = rows, views, place

    def mask(self, layer_idx: int) -> Tensor:
        """The additive attention mask of a layer, as set by `look`: [n, 1, Q, length]."""
        return self._views[self.kind_of[layer_idx]].mask

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [N, kv_heads, Q, head_dim] -> the rows' keys and values [N, kv_heads, length, head_dim]."""
        self.store(torch.cat([key_states, value_states], 1).transpose(1, 2).flatten(0, 1)[self._place], layer_idx)
        return self.read(self._rows, self._views[self.kind_of[layer_idx]], layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, since rows differ in length: the engine passes explicit position ids and masks."""
        return 0

    def copy_out(self, row: int, length: int) -> Tensor:
        """A copy of the first `length` positions of a row: [layers, 2, kv_heads, length, head_dim]."""
        return self.data[:, :, row, :, :length].clone(memory_format=torch.contiguous_format)

    def copy_in(self, row: int, prefix: Tensor) -> None:
        """Write `prefix` [layers, 2, kv_heads, length, head_dim] to the start of a row."""
        self.data[:, :, row, :, : prefix.shape[3]].copy_(prefix)

    def clear(self, row: int, start: int = 0) -> None:
        """Zero a row's positions from `start` on."""
        self.data[:, :, row, :, start:].zero_()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        self.data[:, :, target, :, :length].copy_(self.data[:, :, source, :, :length])


_READING: ContextVar[SlotCache] = ContextVar("the cache that the model's attention reads")


@contextmanager
def reading(cache: SlotCache) -> Iterator[None]:
    """Make `grouped_attention` take each layer's mask from `cache`, whatever mask the model passes to its layers."""
    token = _READING.set(cache)
    try:
        yield
    finally:
        _READING.reset(token)


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Eager attention that reads grouped keys and values in place, instead of first repeating them per query head.

    query: [N, heads, Q, head_dim]; key, value: [N, kv_heads, length, head_dim]; softcap, s_aux (sinks): see `attend`. Returns
    [N, Q, heads, head_dim]. Decoding is bound by reading the cache, so this matters with few key/value heads. Raises ValueError
    for a position bias.
    """
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"the torch engine does not support attention with a position bias ({type(module).__name__})")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = _READING.get().mask(module.layer_idx)
    return attend(query * scaling, key, value, mask, softcap, s_aux).transpose(1, 2).contiguous(), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """softmax(query key' + mask) value, [N, heads, Q, head_dim].

    query: [N, heads, Q, head_dim], already scaled; key, value: [N, kv_heads, length, head_dim]; mask: additive [N, 1, Q, length].
    softcap: scores s become softcap tanh(s / softcap); sinks: [heads] scores of an extra position per head, whose value is 0.
    The softmax is computed in float32.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, -1, head_dim)
    weights = torch.matmul(grouped, key.transpose(2, 3))
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        weights.view(rows, kv_heads, heads // kv_heads, queries, -1).add_(mask[:, :, None])
    if sinks is not None:
        # In front, so that a row's scores keep their places in the sum whatever length other rows need.
        sink = sinks.to(weights.dtype).view(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, queries, 1)
        weights = torch.cat([sink.reshape(rows, kv_heads, -1, 1), weights], -1)
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., 1:]
    return _weighted_sum(weights, value).view(rows, heads, queries, head_dim)


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """weights [N, kv_heads, Q, length] times value [N, kv_heads, length, head_dim], summed over blocks of fixed length.

    On a CPU, matrix products split a long sum depending on its length, so a length that only other rows need would change the
    last bits. A GPU's kernels give no such guarantee anyway, and one product is faster there.
    """
    length = weights.shape[-1]
    if weights.shape[2] == 1 or length <= SUM_BLOCK or weights.device.type != "cpu":
        return torch.matmul(weights, value)
    total = torch.matmul(weights[..., :SUM_BLOCK], value[..., :SUM_BLOCK, :])
    for start in range(SUM_BLOCK, length, SUM_BLOCK):
        total += torch.matmul(weights[..., start : start + SUM_BLOCK], value[..., start : start + SUM_BLOCK, :])
    return total


ATTENTION = "grouped_eager"
AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, eager_mask)
