"""Training forward passes that compute common prefixes of episodes once: a group's prompt, and equal first turns.

Episodes of a group start from one prompt, and often continue alike: the same first action gets the same observation. With rows
sorted by their tokens, a row's longest common prefix with any earlier row is that with the row right before it; the tokens after
this prefix are its own. The own tokens of all rows go through the layers side by side, without padding. Only attention knows
rows: a row's own queries attend to the keys and values of all its tokens, wherever these were computed. Autograd sums the
gradients of the rows that share a token.

It computes the same function as the dense pass (`stages.agent.logprobs.predicting_states`), to float rounding, for the models
that `shares` accepts: with full attention, those of WINDOWED also in layers with a sliding window. The model's own forward pass
runs with an attention function that knows the layout. For the decoder's plain families, this module calls the layers itself, and
the last layer computes queries only for tokens that predict a policy token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from stages.agent.logprobs import States, predicting_states
from stages.agent.prefix_attention import Part, Readers, attend, make_readers
from stages.agent.recompute import attending, recomputed, recomputes
from stages.engine.architectures import LAYER_TYPES, windows
from stages.engine.decoder import FAMILIES, LEAN, hooked, rms_norm
from stages.engine.products import filled
from stages.engine.self_check import FAILURES, evaluating, relative_error, tolerance

ATTENTION = "shared_prefixes"
SPREAD = 1.5
"""Rows attend together if the longest has at most this many times the own tokens of the shortest."""
WINDOWED = ("mistral", "qwen2", "qwen3", "smollm3", "gemma3_text")
"""Model types whose windows are known here. Others with windows also give their attention sinks (gpt-oss) or soft caps (Gemma 2),
or ignore the key (Llama)."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models pass to their attention that changes it, and that is not known here."""
CONFIRMED = 24
"""Tokens of the rows that confirm that a model shares."""
GATHERING = {"cuda"}
"""Types of device whose attention is that of a GPU in `prefix_attention`."""
READ = 4
"""Upper bound of attention's padded tokens in a micro-batch, as a multiple of the tokens that layers compute."""


@dataclass(frozen=True)
class Layout:
    """U distinct tokens of some rows; `nodes` [B, T] is the index of each row's tokens among them, 0 past the end."""

    ids: Tensor
    positions: Tensor
    nodes: Tensor
    parts: list[Part]
    wanted: Tensor
    """[m] indices of the tokens before a policy token, in order."""
    last: list[Part]
    """Parts with the queries of the wanted tokens alone; `start` and `stop` index these."""
    windowed: dict[int, list[Part]] = field(default_factory=dict)
    """`parts` by window, as far as layers have asked for them."""

    def within(self, window: int | None) -> list[Part]:
        """`parts` for a layer in which a token attends to `window` positions, its own included; None: to all before it."""
        if window is None:
            return self.parts
        if window not in self.windowed:
            self.windowed[window] = [_within(part, self.positions, window) for part in self.parts]
        return self.windowed[window]

    def last_within(self, window: int | None) -> list[Part]:
        """`last` for a layer with `window`."""
        if window is None:
            return self.last
        return [_within(part, self.positions[self.wanted], window) for part in self.last]


def _within(part: Part, positions: Tensor, window: int) -> Part:
    """The part with a sliding window; positions: of all queries that parts index."""
    rows, longest = part.nodes.shape
    if longest <= window:
        return part
    width = longest if part.visible is None else part.visible.shape[2]
    position = positions.new_zeros(rows * width).index_copy(0, part.place, positions[part.start : part.stop])
    keys, position = torch.arange(longest, device=positions.device), position.view(rows, 1, width, 1)
    return replace(part, visible=(keys <= position) & (keys > position - window))


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Number of equal tokens at the start of two rows."""
    shorter = min(len(first), len(second))
    same = first[:shorter] == second[:shorter]
    return shorter if same.all() else int(same.argmin())


def in_order(rows: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(row, length of its common prefix with earlier rows), sorted by the rows' tokens."""
    order = sorted(range(len(rows)), key=lambda row: (rows[row].tolist(), row))
    none = np.zeros(0, dtype=np.int64)
    before = [none, *(rows[row] for row in order[:-1])]
    return [(row, common_prefix(rows[row], previous)) for row, previous in zip(order, before, strict=True)]


def fed_rows(token_ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    """The input tokens of each row: all before its last policy token."""
    ends = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1).tolist()
    return [row[:end] for row, end in zip(token_ids.cpu().numpy(), ends, strict=True)]


def plan_shared(token_ids: Tensor, mask: Tensor, rows: Sequence[int], tokens_per_batch: int, least: int = 1) -> list[list[int]]:
    """`rows`, sorted by their tokens, in micro-batches of at most `tokens_per_batch` distinct tokens (a longer row is on its
    own): as few as that allows, but `least` where there are as many rows, with the largest as small as possible. The plan depends
    on the tokens alone."""
    if not rows:
        return []
    chosen = torch.tensor(list(rows))
    fed = fed_rows(token_ids[chosen], mask[chosen])
    ordered = [(place, len(fed[place]), shared) for place, shared in in_order(fed)]
    fill = partial(_fill, ordered, padded=READ * tokens_per_batch)
    least = min(least, len(rows))
    most = max(least, len(fill(tokens_per_batch)))
    budget = 1 + bisect_left(range(1, tokens_per_batch), True, key=lambda budget: len(fill(budget)) <= most)
    plan = fill(budget) if len(fill(budget)) >= least else fill(budget - 1)
    return [[rows[place] for place in group] for group in plan]


def _fill(ordered: Sequence[tuple[int, int, int]], budget: int, padded: int) -> list[list[int]]:
    """Rows (place, length, prefix shared with the row before), in order, in micro-batches of at most `budget` distinct and
    `padded` padded tokens."""
    plan: list[list[int]] = []
    tokens = longest = 0
    for place, length, shared in ordered:
        longest = max(longest, length)
        tokens += length - shared
        if not plan or tokens > budget or (len(plan[-1]) + 1) * longest > padded:
            plan.append([])
            tokens, longest = length, length
        plan[-1].append(place)
    return plan


def make_layout(token_ids: Tensor, mask: Tensor) -> Layout:
    """The layout of token_ids, mask [B, T], on their device."""
    device, (count, width) = token_ids.device, token_ids.shape
    fed = fed_rows(token_ids, mask)
    shared = dict(in_order(fed))
    own = {row: len(fed[row]) - shared[row] for row in shared}
    # Rows without a shared prefix come first: their attention is plainly causal.
    order = sorted((row for row in own if own[row]), key=lambda row: (shared[row] > 0, -own[row], row))
    starts = dict(zip(order, np.cumsum([0, *(own[row] for row in order)]).tolist(), strict=False))
    nodes = np.zeros((count, width), dtype=np.int64)
    previous = np.zeros(0, dtype=np.int64)
    for row, common in shared.items():
        own_nodes = np.arange(own[row]) + starts.get(row, 0)
        previous = np.concatenate([previous[:common], own_nodes])
        nodes[row, : len(previous)] = previous
    ids = np.concatenate([fed[row][shared[row] :] for row in order])
    positions = np.concatenate([np.arange(shared[row], len(fed[row])) for row in order])
    is_wanted = _wanted(mask, nodes, len(ids))
    parts, last, begin, queries = [], [], 0, 0
    while begin < len(order):
        lead = order[begin]
        end = begin
        while end < len(order) and own[order[end]] * SPREAD >= own[lead] and (shared[order[end]] > 0) == (shared[lead] > 0):
            end += 1
        rows = order[begin:end]
        lengths = [len(fed[row]) for row in rows]
        read = nodes[np.array(rows), : max(lengths)]
        readers = make_readers(read, lengths, len(ids), device) if device.type in GATHERING else None
        reading = torch.from_numpy(read).to(device), readers
        places = [np.arange(shared[row], len(fed[row])) for row in rows]
        parts.append(_part(places, starts[lead], *reading, causal=shared[lead] == 0))
        wanted = [positions_[is_wanted[nodes[row, positions_]]] for row, positions_ in zip(rows, places, strict=True)]
        last.append(_part(wanted, queries, *reading))
        queries = last[-1].stop
        begin = end

    def to(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Layout(to(ids), to(positions), to(nodes), parts, to(np.flatnonzero(is_wanted)), last)


def _wanted(mask: Tensor, nodes: np.ndarray, count: int) -> np.ndarray:
    """Whether each of `count` tokens is before a policy token."""
    rows, columns = mask.cpu().numpy().nonzero()
    wanted = np.zeros(count, dtype=bool)
    wanted[nodes[rows, columns - 1]] = True
    return wanted


def _part(places: Sequence[np.ndarray], start: int, nodes: Tensor, readers: Readers | None, causal: bool = False) -> Part:
    """A part with queries at `places` (positions, one array per row) and keys at `nodes` [n, K]."""
    number = np.array([len(positions) for positions in places])
    queries = int(number.max())
    column = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    place = np.repeat(np.arange(len(places)) * queries, number) + column
    visible = None
    if not causal:
        positions = np.zeros(len(places) * queries, dtype=np.int64)
        positions[place] = np.concatenate(places)
        position = torch.from_numpy(positions).to(nodes.device).view(len(places), queries, 1)
        visible = (torch.arange(nodes.shape[1], device=nodes.device) <= position)[:, None]
    inverse = None
    if readers is not None:
        found = np.full(len(places) * queries, len(place))
        found[place] = np.arange(len(place))
        inverse = torch.from_numpy(found).to(nodes.device)
    return Part(start, start + len(place), torch.from_numpy(place).to(nodes.device), nodes, visible, readers, inverse)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    shared_layout: Layout,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, U, head_dim], key and value [1, kv_heads, U, head_dim] -> [1, U, heads, head_dim]. Raises ValueError for
    attention that depends on more."""
    unknown = [name for name in UNKNOWN if others.get(name) is not None]
    if attention_mask is not None or unknown:
        raise ValueError(f"{type(module).__name__} attends with {', '.join(unknown) or 'a mask of its own'}")
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(queries, keys, values, shared_layout.within(sliding_window), scaling)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


def can_share(model: Any) -> bool:
    """Whether the model attends through transformers' attention interface, not compressed (latent), to earlier tokens only, and
    in full or, if it is one of WINDOWED, in a sliding window."""
    config = model.config
    if not getattr(model, "_supports_attention_backend", True) or getattr(config, "kv_lora_rank", None):
        return False
    if getattr(config, "use_bidirectional_attention", None):
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    full = kinds == {"full_attention"} and not getattr(config, "sliding_window", None)
    return full or (kinds <= LAYER_TYPES and getattr(config, "model_type", None) in WINDOWED)


def shares(model: Any) -> bool:
    """Whether `sharing_states` computes the model's states: it `can_share`, and two short rows with a common prefix confirm it
    where the family is not one of the decoder's, which tests compare. Others may attend in a way that can't be told from the
    configuration (Doge by a mask of its own)."""
    if not can_share(model):
        return False
    if model.config.model_type in LEAN:
        return True
    size = model.get_input_embeddings().weight.shape[0]
    places = torch.arange(CONFIRMED, device=model.device)
    apart = torch.tensor([[0], [1]], device=model.device) * (places >= CONFIRMED // 2)
    ids = (7919 * places + places * places + 104_729 * apart) % size
    mask = places.expand_as(ids) >= CONFIRMED // 4
    try:
        with torch.no_grad(), evaluating(model):
            error = relative_error(sharing_states(model, ids, mask), predicting_states(model, ids, mask))
    except FAILURES as problem:
        if isinstance(problem, torch.OutOfMemoryError):
            raise
        return False
    return error <= tolerance(model)


def sharing_states(model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Last hidden states [n, D] at the positions that predict the tokens where `mask` [B, T], in `mask.nonzero()`'s order; as
    `stages.agent.logprobs.predicting_states`, for a model that `shares`."""
    layout = make_layout(token_ids, mask)
    rows, columns = mask.nonzero(as_tuple=True)
    predicting = layout.nodes[rows, columns - 1]
    if model.config.model_type in FAMILIES and not hooked(model):
        return _through_layers(model.base_model, layout).index_select(0, torch.searchsorted(layout.wanted, predicting))
    return _through_model(model, layout).index_select(0, predicting)


def fastest_states(model: Any) -> States:
    """How to compute hidden states of rows with common prefixes: `sharing_states` if the model `shares`."""
    return sharing_states if shares(model) else predicting_states


def _through_model(model: Any, layout: Layout) -> Tensor:
    """Hidden states [U, D] by the model's own forward pass."""
    with attending(model.config, ATTENTION):
        output = model.base_model(
            input_ids=layout.ids[None], position_ids=layout.positions[None], use_cache=False, shared_layout=layout
        )
    return output.last_hidden_state[0]


def _through_layers(decoder: Any, layout: Layout) -> Tensor:
    """Hidden states [m, D] of the wanted tokens, and some rows more, by the modules of a known model family."""
    weight = decoder.embed_tokens.weight
    ids, positions, wanted = (filled(indices, weight) for indices in (layout.ids, layout.positions, layout.wanted))
    hidden = decoder.embed_tokens(ids)
    cos, sin = (part[0, :, None] for part in decoder.rotary_emb(hidden[None], positions[None]))
    window = windows(decoder.config)
    for index, layer in enumerate(decoder.layers):
        last = index == len(decoder.layers) - 1
        parts = layout.last_within(window[index]) if last else layout.within(window[index])
        arguments = layer, hidden, (cos, sin), parts, wanted if last else None
        hidden = recomputed(_layer, *arguments) if recomputes(layer) else _layer(*arguments)
    return rms_norm(hidden, decoder.norm)


def _layer(layer: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor], parts: Sequence[Part], wanted: Tensor | None) -> Tensor:
    """The layer's output [m, D] for the tokens `wanted` [m] (None: all) among those with hidden states [U, D]."""
    attention, normed = layer.self_attn, rms_norm(hidden, layer.input_layernorm)
    keys, values = (project(normed).unflatten(-1, (-1, attention.head_dim)) for project in (attention.k_proj, attention.v_proj))
    rotation_of_queries = rotation
    if wanted is not None:
        hidden, normed = hidden.index_select(0, wanted), normed.index_select(0, wanted)
        cos, sin = rotation
        rotation_of_queries = cos.index_select(0, wanted), sin.index_select(0, wanted)
    queries = attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))
    if hasattr(attention, "q_norm"):
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    queries, keys = _rotate(queries, *rotation_of_queries), _rotate(keys, *rotation)
    attended = attend(queries, keys, values, parts, attention.scaling)
    hidden = hidden + attention.o_proj(attended.flatten(1))
    return hidden + layer.mlp(rms_norm(hidden, layer.post_attention_layernorm))


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of states [n, heads, head_dim] by cos, sin [n, 1, head_dim]."""
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin
