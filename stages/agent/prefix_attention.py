"""Attention of rows that share prefixes (`stages.agent.shared_prefixes`): own queries read keys that any row computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

PRODUCTS = 1 << 25
"""Most attention weights of a part that `by_products` computes on a CPU. It keeps them for the backward pass, 6 bytes each."""


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


def attend(queries: Tensor, keys: Tensor, values: Tensor, parts: Sequence[Part], scaling: float | None) -> Tensor:
    """Attention output [q, heads, head_dim] of the parts' queries, and 0 of further ones, on keys and values
    [U, kv_heads, head_dim]."""
    heads, head_dim, kv_heads = queries.shape[1], queries.shape[2], keys.shape[1]
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
        if _in_products(values, part.visible, heads // kv_heads, rows * heads * width * longest):
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


def _in_products(values: Tensor, visible: Tensor | None, shared: int, weights: int) -> bool:
    """Whether `by_products` computes a part of so many attention weights, `shared` query heads reading one key head. On a GPU,
    PyTorch's fused kernels take no mask with shared heads, and its other kernel computes in float32."""
    if values.device.type != "cpu":
        return visible is not None and shared > 1
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
