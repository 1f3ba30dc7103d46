"""A key/value cache with one row per slot, allocated once, behind Hugging Face's `Cache` interface, and attention that reads it.

Before each forward pass the cache is aimed at the rows and positions that the new tokens go to; `store` then scatters their keys
and values, and `read` gives the rows that attention reads; `update` does both for a Hugging Face model. Rows have their own
lengths: masks and position ids come from the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

SUM_BLOCK = 128
"""Positions that attention adds up in one matrix product on a CPU."""


class SlotCache(Cache):
    """`data`: [layers, 2 (keys, values), slots + 1, kv_heads, capacity, head_dim]; the last row takes what padding writes."""

    def __init__(
        self, layers: int, slots: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        self.slots, self.kv_heads, self.capacity, self.head_dim = slots, kv_heads, capacity, head_dim
        # Zeros, not garbage: masked positions get weight 0, and 0 times NaN would still be NaN.
        self.data = torch.zeros(layers, 2, slots + 1, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self._flat = self.data.view(layers, -1, head_dim)
        self._values_start = (slots + 1) * kv_heads * capacity
        self._heads = torch.arange(kv_heads, device=device)
        self._targets = torch.zeros(0, dtype=torch.long, device=device)
        self._rows: Tensor | slice = slice(0, 0)
        self._length = 0
        self._place = self._targets

    def aim(self, rows: Tensor, positions: Tensor) -> None:
        """Say where the next pass's T new tokens are written: rows and positions [T] int64."""
        # [T, 2, kv_heads]: keys, then values.
        index = (rows[:, None] * self.kv_heads + self._heads) * self.capacity + positions[:, None]
        self._targets = torch.stack([index, index + self._values_start], 1).flatten()

    def store(self, states: Tensor, layer_idx: int) -> None:
        """Write states [T, 2 kv_heads, head_dim], keys before values, to where the cache is aimed at."""
        self._flat[layer_idx].index_copy_(0, self._targets, states.reshape(-1, self.head_dim))

    def read(self, rows: Tensor | slice, length: int, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values [N, kv_heads, length, head_dim] of N rows: [N] int64, or a slice, which spares a copy."""
        keys, values = (self.data[layer_idx, part, :, :, :length] for part in (0, 1))
        if isinstance(rows, slice):
            return keys[rows], values[rows]
        return keys.index_select(0, rows), values.index_select(0, rows)

    def look(self, rows: Tensor | slice, length: int, place: Tensor) -> None:
        """Say what `update` returns, and which of the padded tokens it is given, [T], are stored."""
        self._rows, self._length, self._place = rows, length, place

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [N, kv_heads, Q, head_dim] -> the rows' keys and values [N, kv_heads, length, head_dim]."""
        self.store(torch.cat([key_states, value_states], 1).transpose(1, 2).flatten(0, 1)[self._place], layer_idx)
        return self.read(self._rows, self._length, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows have lengths of their own, and the engine passes explicit position ids and masks."""
        return 0

    def copy_out(self, row: int, length: int) -> Tensor:
        """A copy of the first `length` positions of a row: [layers, 2, kv_heads, length, head_dim]."""
        return self.data[:, :, row, :, :length].clone(memory_format=torch.contiguous_format)

    def copy_in(self, row: int, prefix: Tensor) -> None:
        """Write `prefix` [layers, 2, kv_heads, length, head_dim] to the start of a row."""
        self.data[:, :, row, :, : prefix.shape[3]].copy_(prefix)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        self.data[:, :, target, :, :length].copy_(self.data[:, :, source, :, :length])


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Eager attention that reads grouped keys and values in place, where the stock one first repeats them per query head.

    query: [N, heads, Q, head_dim]; key, value: [N, kv_heads, length, head_dim]; attention_mask: additive [N, 1, Q, length].
    Returns [N, Q, heads, head_dim]. Decoding is bound by reading the cache, so with few key/value heads this is what counts.
    Raises ValueError for attention variants (soft caps, sinks) that it does not compute.
    """
    unsupported = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unsupported:
        raise ValueError(f"the torch engine does not compute attention with {unsupported} (model {type(module).__name__})")
    return attend(query * scaling, key, value, attention_mask).transpose(1, 2).contiguous(), None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(query key' + mask) value, [N, heads, Q, head_dim].

    query: [N, heads, Q, head_dim], scaled already; key, value: [N, kv_heads, length, head_dim]; mask: additive [N, 1, Q, length].
    In float32 between the two products.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, -1, head_dim)
    weights = torch.matmul(grouped, key.transpose(2, 3))
    if mask is not None:
        weights.view(rows, kv_heads, heads // kv_heads, queries, -1).add_(mask[:, :, None])
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return _weighted_sum(weights, value).view(rows, heads, queries, head_dim)


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """weights [N, kv_heads, Q, length] times value [N, kv_heads, length, head_dim], added up over blocks of fixed length.

    On a CPU, matrix products of several rows split a long sum by its length, so that the length others need (zero weights to
    this row) would change its last bits. A GPU's kernels give no such guarantee anyway, and there one product is faster.
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
