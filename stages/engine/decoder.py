"""The torch engine's forward pass: the layers of Llama-like models and Gemma 3, specialised for decoding.

A small model spends most of its time between the matrix products. Unlike transformers' general modules, this pass computes
queries, keys and values in one product, rotary embedding as one in-place complex product, stores keys and values together and
fuses residual additions into products. Results equal the Hugging Face model's up to rounding (tests compare them); other
architectures run through the model itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.engine.cache import SlotCache, attend
from stages.engine.forward import Part, Pass
from stages.engine.low_rank import LowRank, base, is_plain, low_rank

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers consist of RMS norm, rotary attention and a gated SiLU MLP, and nothing else."""
LEAN = (*FAMILIES, "smollm3", "gemma3_text")
"""Model types that `LeanForward` supports: also layers without rotary embedding (SmolLM3), or with one by type of layer, norms by
1 + weight before and after each block, and a gated GELU MLP (Gemma 3)."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": partial(functional.silu, inplace=True),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
"""Activations of the gated MLP, by their names in transformers; they may overwrite their input."""
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend only on the position."""


def serves(model: Any) -> bool:
    """Whether `LeanForward` supports `model`: a known family, linear layers, with LoRA or not, rotary angles over entire
    heads."""
    config, decoder = model.config, model.base_model
    if config.model_type not in LEAN or _activation(config) not in ACTIVATIONS:
        return False
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return False
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or not all(
        rope_type in STATIC_ROTARY and 2 * getattr(rotary, frequencies).numel() == _head_dim(config)
        for rope_type, frequencies in _rotary_kinds(rotary).values()
    ):
        return False
    linear = [
        *(getattr(layer.self_attn, f"{name}_proj") for layer in decoder.layers for name in "qkvo"),
        *(getattr(layer.mlp, f"{name}_proj") for layer in decoder.layers for name in ("gate", "up", "down")),
    ]
    return all(is_plain(module) for module in linear) and not hooked(decoder)


def hooked(module: nn.Module) -> bool:
    """Whether the module or a submodule has forward hooks, as under FSDP."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _rotary_kinds(rotary: Any) -> dict[str | None, tuple[str, str]]:
    """By type of layer (None if the embedding is the same for all): the rotary embedding's type and the attribute that holds its
    frequencies."""
    kinds = getattr(rotary, "rope_type", "default")
    if isinstance(kinds, dict):
        return {layer: (rope_type, f"{layer}_inv_freq") for layer, rope_type in kinds.items()}
    return {None: (kinds, "inv_freq")}


def _rotary_index(attention: Any, kinds: list[str | None]) -> int | None:
    """Which of `kinds` of rotary embedding a layer's attention uses; None: none."""
    if not getattr(attention, "use_rope", True):
        return None
    return kinds.index(attention.layer_type) if None not in kinds else 0


class LeanForward:
    """The specialised forward pass. It holds a joint copy of the query, key and value projections: the two halves of each head's
    queries and keys are interleaved for the complex rotary product, and attention's scale is folded into the queries."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self.model, self.cache = model, cache
        config = model.config
        self.head_dim, self.heads = _head_dim(config), config.num_attention_heads
        self.rotated = self.heads + cache.kv_heads
        half = self.head_dim // 2
        self._order = torch.stack([torch.arange(half), torch.arange(half) + half], -1).flatten()
        self._activation = ACTIVATIONS[_activation(config)]
        layers, kinds = model.base_model.layers, list(_rotary_kinds(model.base_model.rotary_emb))
        self._angles = [self._angles_of(kind) for kind in kinds]
        self._rotary_of = [_rotary_index(layer.self_attn, kinds) for layer in layers]
        self._norms = [_norms(layer) for layer in layers]
        self._projections: list[tuple[Tensor, Tensor | None]] = []
        self._head_norms: list[Tensor | None] = []
        self._low: list[tuple[LowRank | None, ...]] = []
        """Of each layer's adapters: for queries, keys and values, for attention's output, for gate and up, and for down."""
        self._owns_copies = True
        """Whether this pass updates the joint copies; not one that reads another's."""
        self.refresh()

    def _angles_of(self, kind: str | None) -> Tensor:
        """Unit complex numbers [capacity, head_dim / 2] by position, for layers of type `kind`."""
        positions = torch.arange(self.cache.capacity, device=self.cache.data.device)
        # Angles are float32 whatever the model's dtype.
        reference = torch.zeros((), dtype=torch.float32, device=self.cache.data.device)
        cos, sin = self.model.base_model.rotary_emb(reference, positions[None], *([] if kind is None else [kind]))
        half = self.head_dim // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())

    # ---- weights ------------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        with torch.no_grad():
            for index, layer in enumerate(self.model.base_model.layers):
                if self._owns_copies:
                    self._refresh_copies(index, layer.self_attn)
                low = self._joined_low_rank(layer)
                if index == len(self._low):
                    self._low.append(low)
                    continue
                for before, after in zip(self._low[index], low, strict=True):
                    if before is not None and after is not None:
                        before.copy_(after)

    def _refresh_copies(self, index: int, attention: Any) -> None:
        projection, norms = self._joined(attention), self._joined_norms(attention)
        if index == len(self._projections):
            self._projections.append(projection)
            self._head_norms.append(norms)
            return
        # In place, since CUDA graphs refer to the tensors by address.
        for old, new in zip((*self._projections[index], self._head_norms[index]), (*projection, norms), strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    def beside(self, model: Any) -> LeanForward:
        """See `Forward.beside`; it reads this pass's joint copies, which its adapters add to."""
        other = copy.copy(self)
        other.model, other._low, other._owns_copies = model, [], False
        other.refresh()
        return other

    def _interleave(self, rows: Tensor) -> Tensor:
        """rows [heads * head_dim, ...] with the halves of each head interleaved."""
        return rows.unflatten(0, (-1, self.head_dim))[:, self._order.to(rows.device)].flatten(0, 1)

    def _joined(self, attention: Any) -> tuple[Tensor, Tensor | None]:
        """Weight [(heads + 2 kv_heads) * head_dim, D] and bias of queries, keys and values."""
        # A norm over each head would undo the scale; it is then folded into the norm's weights.
        scale = 1.0 if hasattr(attention, "q_norm") else attention.scaling
        q, k, v = base(attention.q_proj), base(attention.k_proj), base(attention.v_proj)
        weight = torch.cat([self._interleave(q.weight) * scale, self._interleave(k.weight), v.weight])
        if q.bias is None:
            return weight, None
        return weight, torch.cat([self._interleave(q.bias) * scale, self._interleave(k.bias), v.bias])

    def _joined_low_rank(self, layer: Any) -> tuple[LowRank | None, ...]:
        """See `_low`."""
        attention, mlp = layer.self_attn, layer.mlp
        scale = 1.0 if hasattr(attention, "q_norm") else attention.scaling
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        return (
            low_rank(qkv, (lambda b: self._interleave(b) * scale, self._interleave, None)),
            low_rank([attention.o_proj]),
            low_rank([mlp.gate_proj, mlp.up_proj]),
            low_rank([mlp.down_proj]),
        )

    def _joined_norms(self, attention: Any) -> Tensor | None:
        """Weights [heads + kv_heads, head_dim] of the norms over each head's queries and keys, if the family has them."""
        if not hasattr(attention, "q_norm"):
            return None
        q, k = (self._interleave(_norm_weight(norm)) for norm in (attention.q_norm, attention.k_norm))
        return torch.cat([(q * attention.scaling).expand(self.heads, -1), k.expand(self.cache.kv_heads, -1)])

    # ---- the pass -----------------------------------------------------------------------------------------------------------

    def __call__(self, batch: Pass) -> Tensor:
        decoder = self.model.base_model
        self.cache.aim(batch.targets, batch.positions)
        turns = [angles[batch.positions, None] for angles in self._angles]
        hidden = decoder.embed_tokens(batch.ids)
        last = len(decoder.layers) - 1
        for index, layer in enumerate(decoder.layers):
            after_attention, before_mlp, after_mlp = self._norms[index]
            rotary = self._rotary_of[index]
            angles = None if rotary is None else turns[rotary]
            normed = rms_norm(hidden, layer.input_layernorm)
            if index == last and batch.ends is not None:
                mixed, hidden = self._attention_of_ends(index, layer.self_attn, normed, angles, batch), hidden[batch.ends]
            else:
                mixed = self._attention(index, layer.self_attn, normed, angles, batch)
            hidden = _add_linear(hidden, mixed, layer.self_attn.o_proj, after_attention, self._low[index][1])
            gated = self._gated(index, layer.mlp, rms_norm(hidden, before_mlp))
            hidden = _add_linear(hidden, gated, layer.mlp.down_proj, after_mlp, self._low[index][3])
        return rms_norm(hidden, decoder.norm)

    def _gated(self, index: int, mlp: Any, normed: Tensor) -> Tensor:
        """What the MLP's last layer reads, [T, F], for normed hidden states [T, D]."""
        gate, up = base(mlp.gate_proj)(normed), base(mlp.up_proj)(normed)
        if (low := self._low[index][2]) is not None:
            inner, width = normed @ low.a.t(), gate.shape[-1]
            gate.addmm_(inner, low.b[:width].t())
            up.addmm_(inner, low.b[width:].t())
        return self._activation(gate).mul_(up)

    def _heads(self, index: int, attention: Any, normed: Tensor, angles: Tensor | None, which: slice) -> Tensor:
        """Heads `which` (queries, then keys, then values) [n, heads, head_dim] for normed hidden states [n, D], rotated
        by `angles` [n, 1, head_dim / 2], if any."""
        weight, bias = self._projections[index]
        rows = slice(which.start * self.head_dim, which.stop * self.head_dim)
        product = functional.linear(normed, weight[rows], None if bias is None else bias[rows])
        if (low := self._low[index][0]) is not None:
            low.add(product, normed, rows)
        joined = product.unflatten(-1, (-1, self.head_dim))
        turning = joined[:, : self.rotated - which.start]
        weights = self._head_norms[index]
        if weights is not None:
            epsilon = _norm_epsilon(attention.q_norm)
            turning.copy_(functional.rms_norm(turning, (self.head_dim,), None, epsilon).mul_(weights[which.start : which.stop]))
        if angles is not None:
            _rotate(turning, angles)
        return joined

    def _attention(self, index: int, attention: Any, normed: Tensor, angles: Tensor | None, batch: Pass) -> Tensor:
        """Attention's output [T, heads * head_dim] for normed hidden states [T, D]."""
        joined = self._heads(index, attention, normed, angles, slice(0, self.rotated + self.cache.kv_heads))
        self.cache.store(joined[:, self.heads :], index)
        read = [self._read(index, joined[part.start : part.stop, : self.heads], part) for part in batch.parts]
        return _pad_rows(read, len(joined))

    def _attention_of_ends(self, index: int, attention: Any, normed: Tensor, angles: Tensor | None, batch: Pass) -> Tensor:
        """Attention's output [n, heads * head_dim] for the output tokens alone: one per row of each part, in the rows' order."""
        ends = batch.ends
        assert ends is not None
        joined = self._heads(index, attention, normed, angles, slice(self.heads, self.rotated + self.cache.kv_heads))
        self.cache.store(joined, index)
        turned = None if angles is None else angles[ends]
        queries = self._heads(index, attention, normed[ends], turned, slice(0, self.heads))
        read, start = [], 0
        for part in batch.parts:
            assert part.place is not None
            view = part.views[self.cache.kind_of[index]]
            count = view.mask.shape[0]
            own = slice(start, start + count)
            place = part.place[ends[own] - part.start]
            mask = view.mask.flatten(0, 2)[place].view(count, 1, 1, -1)
            keys, values = self.cache.read(part.rows, view, index)
            read.append(attend(queries[own, :, None], keys, values, mask).reshape(count, -1))
            start += count
        return _pad_rows(read, len(ends))

    def _read(self, index: int, queries: Tensor, part: Part) -> Tensor:
        """Attention's output [t, heads * head_dim] for a part's queries [t, heads, head_dim]."""
        view = part.views[self.cache.kind_of[index]]
        rows, width = part.shape
        keys, values = self.cache.read(part.rows, view, index)
        if part.place is not None:
            queries = queries.new_zeros(rows * width, *queries.shape[1:]).index_copy_(0, part.place, queries)
        queries = queries.view(rows, width, self.heads, self.head_dim).transpose(1, 2)
        read = attend(queries, keys, values, view.mask).transpose(1, 2).reshape(rows * width, -1)
        return read if part.place is None else read[part.place]


def _pad_rows(parts: list[Tensor], count: int) -> Tensor:
    """Concatenate the parts and pad with zeros to `count` rows."""
    missing = count - sum(len(part) for part in parts)
    if missing:
        parts = [*parts, parts[0].new_zeros(missing, parts[0].shape[1])]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rms_norm(hidden: Tensor, module: Any) -> Tensor:
    """The RMS norm `module` of a model of LEAN applied to hidden states [..., D]."""
    if hasattr(module, "variance_epsilon"):
        return functional.rms_norm(hidden, (hidden.shape[-1],), module.weight, module.variance_epsilon)
    return functional.rms_norm(hidden.float(), (hidden.shape[-1],), _norm_weight(module), module.eps).type_as(hidden)


def _norm_weight(module: Any) -> Tensor:
    """What an RMS norm multiplies by: its weight, or 1 + weight in float32 in Gemma 3 (whose norms name their epsilon `eps`)."""
    return module.weight if hasattr(module, "variance_epsilon") else 1.0 + module.weight.float()


def _norm_epsilon(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def _norms(layer: Any) -> tuple[Any, Any, Any]:
    """A layer's norms after attention (or None), before the MLP, and after the MLP (or None)."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return layer.post_attention_layernorm, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
    return None, layer.post_attention_layernorm, None


def _add_linear(residual: Tensor, states: Tensor, module: Any, norm: Any, low: LowRank | None) -> Tensor:
    """residual + norm(module(states)); `low`: what the module's adapter adds."""
    linear = base(module)
    product = linear(states) if norm is not None else torch.addmm(residual, states, linear.weight.t())
    if low is not None:
        low.add(product, states)
    if norm is not None:
        return residual + rms_norm(product, norm)
    return product if linear.bias is None else product.add_(linear.bias)


def _rotate(heads: Tensor, angles: Tensor) -> None:
    """Rotate adjacent pairs of heads [n, heads, head_dim] by angles [n, 1, head_dim / 2] (unit complex numbers), in place."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(angles)
    else:
        turned = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2))) * angles
        heads.copy_(torch.view_as_real(turned).flatten(-2))
