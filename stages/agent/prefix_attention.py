"""Attention of rows that share prefixes (`stages.agent.shared_prefixes`): own queries read keys that any row computed.

On a CPU, autograd's own gathers and a fused kernel, or in bfloat16 two matrix products. On a GPU, a fused kernel with a copy of
the key heads for each query head, since with shared heads few releases of PyTorch take a mask; and gathers whose gradients are
gathers too, since adding them in a fixed order otherwise takes a sort in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

PRODUCTS = 1 << 25
"""Most attention weights of a part that `by_products` computes on a CPU. It keeps them for the backward pass, 6 bytes each."""


@dataclass(frozen=True)
class Readers:
    """Which places read each of U tokens."""

    places: tuple[Tensor, ...]
    """[u, r] each: the r places that read one of u tokens."""
    order: Tensor
    """[U] each token's row in the concatenated `places`; the number of their rows for a token that no place reads."""


@dataclass(frozen=True)
class Part:
    """n rows with at most Q own tokens and K tokens in all."""

    start: int
    stop: int
    """The range of the rows' own tokens among all [U]."""
    place: Tensor
    """[stop - start] index of each own token in the flattened [n, Q]."""
    nodes: Tensor
    """[n, K] index of each of the rows' tokens among the U; 0 past the end."""
    visible: Tensor | None
    """[n, 1, Q, K] bool: attention mask. None: all tokens are the rows' own, with a causal mask."""
    readers: Readers | None = None
    """Of the flattened `nodes`, all but those past the end: for a GPU."""
    inverse: Tensor | None = None
    """[n Q] the index in `place` of each place of the flattened [n, Q]; len(place) for a place without a token. For a GPU."""


def make_readers(nodes: np.ndarray, lengths: Sequence[int], count: int, device: torch.device) -> Readers:
    """The readers of `count` tokens at the places of nodes [n, K], of which the first `lengths` [n] of each row are tokens."""
    places = np.flatnonzero(np.arange(nodes.shape[1]) < np.array(lengths)[:, None])
    places = places[np.argsort(nodes.flat[places], kind="stable")]
    tokens, starts, counts = np.unique(nodes.flat[places], return_index=True, return_counts=True)
    numbers = np.unique(counts).tolist()
    tables = [places[starts[counts == number][:, None] + np.arange(number)] for number in numbers]
    order = np.full(count, len(tokens))
    order[np.concatenate([tokens[counts == number] for number in numbers])] = np.arange(len(tokens))
    return Readers(tuple(torch.from_numpy(table).to(device) for table in tables), torch.from_numpy(order).to(device))


def attend(queries: Tensor, keys: Tensor, values: Tensor, parts: Sequence[Part], scaling: float | None) -> Tensor:
    """Attention output [q, heads, head_dim] of the parts' queries, and 0 of further ones, on keys and values
    [U, kv_heads, head_dim]."""
    heads, head_dim, kv_heads = queries.shape[1], queries.shape[2], keys.shape[1]
    if parts[0].readers is not None:
        outputs = _on_gpu(queries.to(values.dtype), torch.cat([keys.to(values.dtype), values], -1), parts, scaling)
        return torch.cat([*outputs, outputs[-1].new_zeros(len(queries) - parts[-1].stop, heads, head_dim)])
    outputs = []
    for part in parts:
        rows, longest = part.nodes.shape
        width = longest if part.visible is None else part.visible.shape[2]
        padded = queries.new_zeros(rows * width, heads, head_dim).index_copy(0, part.place, queries[part.start : part.stop])
        keys_values = [
            states.index_select(0, part.nodes.flatten()).view(rows, longest, kv_heads, head_dim).transpose(1, 2)
            for states in (keys, values)
        ]
        blocks = padded.view(rows, width, heads, head_dim).transpose(1, 2)
        if _in_products(values, rows * heads * width * longest):
            q, k, v = (states.to(values.dtype) for states in (blocks, *keys_values))  # under autocast some are in float32
            output = by_products(q, k, v, part.visible, head_dim**-0.5 if scaling is None else scaling)
        else:
            output = functional.scaled_dot_product_attention(
                *(blocks, *keys_values),
                attn_mask=part.visible,
                is_causal=part.visible is None,
                scale=scaling,
                enable_gqa=heads != kv_heads,
            )
        outputs.append(output.transpose(1, 2).reshape(rows * width, heads, head_dim).index_select(0, part.place))
    return torch.cat([*outputs, queries.new_zeros(len(queries) - parts[-1].stop, heads, head_dim)])


def _in_products(values: Tensor, weights: int) -> bool:
    """Whether `by_products` computes a part of so many attention weights."""
    return values.dtype == torch.bfloat16 and weights <= PRODUCTS


def by_products(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    """Attention output [n, heads, Q, head_dim] by two matrix products: queries of that shape, keys and values
    [n, kv_heads, K, head_dim], visible [n or 1, 1, Q, K] bool, None: causal. On a CPU, PyTorch's fused kernel takes twice as long
    in bfloat16; but it keeps no attention weights for the backward pass."""
    (rows, heads, width, head_dim), kv_heads, longest = queries.shape, keys.shape[1], keys.shape[2]
    if visible is None:
        visible = torch.ones(width, longest, dtype=torch.bool, device=queries.device).tril()
    grouped = queries.reshape(rows, kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(-1, -2)).view(rows, heads, width, longest).float() * scaling
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(values.dtype)
    return (weights.view(rows, kv_heads, -1, longest) @ values).view(rows, heads, width, head_dim)


def _on_gpu(queries: Tensor, keys_values: Tensor, parts: Sequence[Part], scaling: float | None) -> list[Tensor]:
    """Attention output [q, heads, head_dim] of each part.

    keys_values: [U, kv_heads, 2 head_dim], of the precision of the queries [q, heads, head_dim].
    """
    (_, heads, head_dim), kv_heads = queries.shape, keys_values.shape[1]
    outputs = []
    for part in parts:
        rows, longest = part.nodes.shape
        width = longest if part.visible is None else part.visible.shape[2]
        padded = queries.new_zeros(rows * width, heads, head_dim).index_copy(0, part.place, queries[part.start : part.stop])
        read: Tensor = _Read.apply(keys_values, part.nodes.flatten(), part.readers)
        read = read.view(rows, longest, kv_heads, 1, 2, head_dim).expand(-1, -1, -1, heads // kv_heads, -1, -1)
        keys, values = read.permute(4, 0, 2, 3, 1, 5).reshape(2, rows, heads, longest, head_dim)
        output = functional.scaled_dot_product_attention(
            *(padded.view(rows, width, heads, head_dim).transpose(1, 2), keys, values),
            attn_mask=part.visible,
            is_causal=part.visible is None,
            scale=scaling,
        )
        outputs.append(_Taken.apply(output.transpose(1, 2).reshape(rows * width, heads, head_dim), part.place, part.inverse))
    return outputs


class _Taken(torch.autograd.Function):
    """`index_select` along the first dimension at places of which none is taken twice; see `Part.inverse`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return states.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _at(gradients[0], ctx.inverse), None, None


class _Read(torch.autograd.Function):
    """`index_select` along the first dimension at `nodes`, whose gradient at other places than those of `readers` is 0. States
    [U or more, ...] past the readers' U are not read."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, nodes: Tensor, readers: Readers) -> Tensor:
        ctx.readers, ctx.more = readers, len(states) - len(readers.order)
        return states.index_select(0, nodes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        sums = [gradient.index_select(0, places.flatten()).unflatten(0, places.shape).sum(1) for places in ctx.readers.places]
        found = _at(torch.cat(sums), ctx.readers.order)
        return torch.cat([found, found.new_zeros(ctx.more, *found.shape[1:])]) if ctx.more else found, None, None


def _at(states: Tensor, index: Tensor) -> Tensor:
    """Rows of `states` by `index`; 0 for an index past their end."""
    return torch.cat([states, states.new_zeros(1, *states.shape[1:])]).index_select(0, index)
