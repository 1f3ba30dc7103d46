"""A model's own forward pass with its own cache, whatever that is: keys and values, compressed ones, a recurrent state.

What a model's cache can do is found by trial when the engine is created: some take several new tokens at a time, some one, and
models without a usable cache are computed from the start for each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CACHES = ("past_key_values", "cache_params", "state", "mems")
"""What transformers' models call the cache that they return and take."""


@dataclass(frozen=True)
class Way:
    """How new tokens are computed. chunk: how many at a time once there is a cache (0: no cache, all tokens again each time);
    masked: whether the model is given an attention mask over all tokens so far."""

    chunk: int
    masked: bool = False


WAYS = (Way(256), Way(256, True), Way(1), Way(1, True), Way(0))
"""From the fastest to the one that is always right for a causal model."""


class OwnForward:
    """Hidden states of one sequence at a time."""

    def __init__(self, model: Any, way: Way) -> None:
        self.model, self.way = model, way
        self._parameters = set(inspect.signature(model.base_model.forward).parameters)

    def feed(self, tokens: Sequence[int], cached: int, cache: Any) -> tuple[Tensor, Any]:
        """Hidden states [n, D] of `tokens[cached:]`, and the cache after them. `cache` holds the first `cached` tokens and is
        changed in place or dropped."""
        if not self.way.chunk:
            return self._pass(tokens, 0, None)[0][cached:], None
        found, at = [], cached
        while at < len(tokens):
            end = len(tokens) if cache is None else min(at + self.way.chunk, len(tokens))
            hidden, cache = self._pass(tokens[:end], at, cache)
            found.append(hidden)
            at = end
        return torch.cat(found), cache

    def _pass(self, tokens: Sequence[int], cached: int, cache: Any) -> tuple[Tensor, Any]:
        ids = torch.tensor([list(tokens[cached:])], device=self.model.device)
        positions = torch.arange(cached, len(tokens), device=ids.device)
        offered = {"position_ids": positions[None], "cache_position": positions, "use_cache": bool(self.way.chunk)}
        if self.way.masked:
            offered["attention_mask"] = torch.ones(1, len(tokens), dtype=torch.long, device=ids.device)
        name = next((name for name in CACHES if name in self._parameters), None)
        if cache is not None:
            assert name is not None
            offered[name] = cache
        known = {key: value for key, value in offered.items() if key in self._parameters}
        output = self.model.base_model(input_ids=ids, **known)
        after = getattr(output, name, None) if name and self.way.chunk else None
        if self.way.chunk and after is None:
            raise ValueError("the model returns no cache")
        return output.last_hidden_state[0], after
