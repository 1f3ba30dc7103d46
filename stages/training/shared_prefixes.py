"""Training forward passes that read what episodes have in common once: a group's prompt, and any further turns that are the same.

Episodes of a group start from one prompt, and often go on alike: the same first action brings the same observation. Sorted by
their tokens, each row has its longest common prefix with the rows before it in common with the one right before it; what
follows is its own. The own tokens of all rows go through the layers side by side, without padding; only attention looks at rows,
where a row's own queries meet the keys and values of all its tokens, wherever these were computed. Each gradient is the sum over
the rows that share a token, which autograd takes where keys and values are handed out.

The same function as the dense pass (`stages.agent.policy.predicting_states`), to float rounding, for any model with full
attention: the model's own layers run, with an attention function that knows the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from stages.training.recompute import recomputes

ATTENTION = "shared_prefixes"
SPREAD = 1.5
"""Rows attend together while the longest has at most this many times the own tokens of the shortest."""
READ = 4
"""Tokens that attention reads in a micro-batch, padding included, are at most this many times those that layers compute."""


@dataclass(frozen=True)
class Part:
    """n rows with a similar number Q of own tokens, and at most K tokens in all."""

    start: int
    stop: int
    """The rows' own tokens, among all [U]."""
    place: Tensor
    """[stop - start] index of each own token in the flattened [n, Q]."""
    nodes: Tensor
    """[n, K] which of the U tokens stands at each place of the row; 0 after its end."""
    visible: Tensor | None
    """[n, 1, Q, K] bool: what a query sees. None: all tokens are the rows' own, and each sees those up to itself."""


@dataclass(frozen=True)
class Layout:
    """U distinct tokens of some rows; `nodes` [B, T] says which of them stands where in each row, 0 after its end."""

    ids: Tensor
    positions: Tensor
    nodes: Tensor
    parts: list[Part]


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Number of equal tokens at the start of two rows."""
    shorter = min(len(first), len(second))
    same = first[:shorter] == second[:shorter]
    return shorter if same.all() else int(same.argmin())


def in_order(rows: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(row, its common prefix with the rows before it), in the order of the rows' tokens."""
    order = sorted(range(len(rows)), key=lambda row: (rows[row].tolist(), row))
    none = np.zeros(0, dtype=np.int64)
    before = [none, *(rows[row] for row in order[:-1])]
    return [(row, common_prefix(rows[row], previous)) for row, previous in zip(order, before, strict=True)]


def fed_rows(token_ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    """The tokens of each row that are read: all before its last policy token."""
    ends = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1).tolist()
    return [row[:end] for row, end in zip(token_ids.cpu().numpy(), ends, strict=True)]


def plan_shared(token_ids: Tensor, mask: Tensor, rows: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """`rows` in micro-batches of rows that follow one another in the order of their tokens, each with at most `tokens_per_batch`
    distinct tokens (a longer row stands alone); the plan depends on the tokens alone."""
    chosen = torch.tensor(list(rows))
    fed = fed_rows(token_ids[chosen], mask[chosen])
    plan: list[list[int]] = []
    tokens = longest = 0
    for place, shared in in_order(fed):
        length = len(fed[place])
        longest = max(longest, length)
        tokens += length - shared
        full = tokens > tokens_per_batch or (plan and (len(plan[-1]) + 1) * longest > READ * tokens_per_batch)
        if not plan or full:
            plan.append([])
            tokens, longest = length, length
        plan[-1].append(rows[place])
    return plan


def make_layout(token_ids: Tensor, mask: Tensor) -> Layout:
    """The layout of rows token_ids, mask [B, T], on their device."""
    device, (count, width) = token_ids.device, token_ids.shape
    fed = fed_rows(token_ids, mask)
    shared = dict(in_order(fed))
    own = {row: len(fed[row]) - shared[row] for row in shared}
    # Rows that own all they read come first: their attention needs no mask.
    order = sorted((row for row in own if own[row]), key=lambda row: (shared[row] > 0, -own[row], row))
    starts = dict(zip(order, np.cumsum([0, *(own[row] for row in order)]).tolist(), strict=False))
    nodes = np.zeros((count, width), dtype=np.int64)
    previous = np.zeros(0, dtype=np.int64)
    for row, common in shared.items():
        mine = np.arange(own[row]) + starts.get(row, 0)
        previous = np.concatenate([previous[:common], mine])
        nodes[row, : len(previous)] = previous
    ids = np.concatenate([fed[row][shared[row] :] for row in order])
    positions = np.concatenate([np.arange(shared[row], len(fed[row])) for row in order])
    parts, begin = [], 0
    while begin < len(order):
        lead = order[begin]
        end = begin
        while end < len(order) and own[order[end]] * SPREAD >= own[lead] and (shared[order[end]] > 0) == (shared[lead] > 0):
            end += 1
        parts.append(_part(order[begin:end], starts[lead], own, shared, nodes, device))
        begin = end
    to = lambda values: torch.from_numpy(values).to(device)  # noqa: E731
    return Layout(to(ids), to(positions), to(nodes), parts)


def _part(
    rows: Sequence[int], start: int, own: dict[int, int], shared: dict[int, int], nodes: np.ndarray, device: torch.device
) -> Part:
    number = np.array([own[row] for row in rows])
    first = np.array([shared[row] for row in rows])
    queries, keys = int(number.max()), int((first + number).max())
    column = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    place = np.repeat(np.arange(len(rows)) * queries, number) + column
    visible = None
    if first.any():
        position = torch.from_numpy(first[:, None] + np.arange(queries)).to(device)
        visible = (torch.arange(keys, device=device) <= position[:, :, None])[:, None]
    picked = torch.from_numpy(nodes[np.array(rows), :keys]).to(device)
    return Part(start, start + len(place), torch.from_numpy(place).to(device), picked, visible)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    shared_layout: Layout,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, U, head_dim], key and value [1, kv_heads, U, head_dim] -> [1, U, heads, head_dim]."""
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    read = []
    for part in shared_layout.parts:
        rows, longest = part.nodes.shape
        width = longest if part.visible is None else part.visible.shape[2]
        asked = queries.new_zeros(rows * width, heads, head_dim).index_copy(0, part.place, queries[part.start : part.stop])
        seen = [
            states.index_select(0, part.nodes.flatten()).view(rows, longest, kv_heads, head_dim).transpose(1, 2)
            for states in (keys, values)
        ]
        answer = functional.scaled_dot_product_attention(
            asked.view(rows, width, heads, head_dim).transpose(1, 2),
            *seen,
            attn_mask=part.visible,
            is_causal=part.visible is None,
            scale=scaling,
            enable_gqa=heads != kv_heads,
        )
        read.append(answer.transpose(1, 2).reshape(rows * width, heads, head_dim).index_select(0, part.place))
    return torch.cat(read)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


def can_share(model: Any) -> bool:
    """Whether every layer of the model attends to all earlier tokens, and its activations are kept for the backward pass."""
    config = model.config
    full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    return full and not getattr(config, "sliding_window", None) and not recomputes(model)


def sharing_states(model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Last hidden states [n, D] at the positions that predict the tokens where `mask` [B, T], in `mask.nonzero()`'s order; as
    `stages.agent.policy.predicting_states`, for a model that `can_share`."""
    layout = make_layout(token_ids, mask)
    config = model.config
    trained_with = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        output = model.base_model(
            input_ids=layout.ids[None], position_ids=layout.positions[None], use_cache=False, shared_layout=layout
        )
    finally:
        config._attn_implementation = trained_with
    rows, columns = mask.nonzero(as_tuple=True)
    return output.last_hidden_state[0].index_select(0, layout.nodes[rows, columns - 1])
