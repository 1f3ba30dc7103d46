"""The torch engine compared with the model's own forward pass, once, when it is made.

An attention variant that the engine does not know would change every log-probability, and nothing else would show it. So a few
rows of made-up tokens, of unequal length and up to max_length, are fed and decoded as in a rollout, and their hidden states
compared with those that training computes. No random number is drawn, and the cache is left empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stages.engine.slots import Session

if TYPE_CHECKING:
    from stages.engine.torch_engine import TorchEngine

DECODED = 3
"""Tokens of each row that are decoded one by one; those before are fed."""
BOUND = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.15}
"""Largest difference between hidden states, relative to their norm, by the model's precision: well above what rounding in another
order makes, and below what attention to other positions does. Our choice."""


def check_against_model(engine: TorchEngine) -> None:
    """Raise ValueError if the engine does not compute the model's hidden states."""
    texts = _texts(engine)
    with torch.inference_mode(), _evaluating(engine.model):
        own = _own_states(engine.model, texts)
        try:
            difference = _difference(engine, texts, own)
        except (RuntimeError, TypeError, AttributeError, IndexError, KeyError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"{_name(engine.model)} does not run in the torch engine ({error}); {_ADVICE}") from error
    bound = BOUND.get(engine.model.dtype, BOUND[torch.float32])
    if not difference <= bound:  # nor is NaN
        raise ValueError(
            f"{_name(engine.model)}: the torch engine's hidden states differ from those of the model's own forward pass by "
            f"{difference:.2g} of their norm (at most {bound:g} in {str(engine.model.dtype).removeprefix('torch.')}, "
            f"rows of up to model.max_length {engine.max_length} tokens), so it would sample with other probabilities than "
            f"training computes; {_ADVICE}"
        )


_ADVICE = (
    "set model.path to a causal language model of another architecture, or model.max_length to less, if its attention reaches "
    "less far than the engine's"
)


def _name(model: Any) -> str:
    return f"{type(model).__name__} (model_type {model.config.model_type})"


def _texts(engine: TorchEngine) -> list[list[int]]:
    """Rows of tokens of unequal length, the first of max_length, no two alike."""
    longest, vocabulary = engine.max_length, engine.model.get_input_embeddings().weight.shape[0]
    lengths = [longest, longest - longest // 3, longest // 2, 8][: engine.slots]
    return [
        [(7919 * place + 104_729 * row + place * place) % vocabulary for place in range(max(min(length, longest), 1))]
        for row, length in enumerate(lengths)
    ]


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Within, the model is in evaluation mode, with the attention that training has, whose memory does not grow with the square
    of the length."""
    training, attention = model.training, model.config._attn_implementation
    if training:
        model.eval()
    if attention == "eager" and getattr(model, "_supports_sdpa", False):
        model.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        if training:
            model.train()


def _own_states(model: Any, texts: list[list[int]]) -> list[Tensor]:
    """The model's hidden states [length, D] of each row; one row at a time, as they are of unequal length."""
    rows = [torch.tensor([text], device=model.device) for text in texts]
    return [model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0] for ids in rows]


def _difference(engine: TorchEngine, texts: list[list[int]], own: list[Tensor]) -> float:
    """How far the engine's states are from `own`, relative to the norm of the latter: that of the row where it is largest."""
    table = engine.table
    fed = [max(len(text) - DECODED, 1) for text in texts]
    sessions = [Session(row, text[:count], None, 0) for row, (text, count) in enumerate(zip(texts, fed, strict=True))]
    found: dict[int, list[Tensor]] = {}
    try:
        for session in sessions:
            table.place(session)
        states = engine._feed(sessions, keep=0)
        found = {session.id: [states[session.id]] for session in sessions}
        for step in range(DECODED):
            left = [session for session in sessions if fed[session.id] + step < len(texts[session.id])]
            table.active[:] = False
            for session in left:
                table.active[session.slot] = True
                table.last[session.slot] = texts[session.id][fed[session.id] + step]
            if left:
                hidden = engine._decode()
                for session in left:
                    found[session.id].append(hidden[session.slot])
            table.position[np.flatnonzero(table.active)] += 1
    finally:
        for row in {session.slot for session in sessions} - {-1} | {engine.cache.slots}:
            engine.cache.clear(row)
        for session in sessions:
            if session.slot >= 0:
                table.last[session.slot] = 0
                table.vacate(session)
    return max(_apart(torch.stack(states), own[row][fed[row] - 1 :]) for row, states in found.items())


def _apart(states: Tensor, own: Tensor) -> float:
    """Median over positions of |states - own| / |own|, both [n, D]: where rounding sends a token to another expert, it is that
    token's states alone which change much."""
    own = own.float()
    least = torch.finfo(torch.float32).tiny
    return float(((states.float() - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(least)).median())
