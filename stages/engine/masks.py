"""Masks over tokens: what may come next in a turn, as the turn grows. The engines of this process apply them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stages.records.episode import Owner


class TokenMask(Protocol):
    """The mask of one turn; an object for each request."""

    renormalise: bool
    """Whether log-probabilities are those of the masked distribution, else of the distribution without the mask."""

    def allowed(self) -> np.ndarray | None:
        """Which of the tokenizer's tokens may come next, bool with at least one True; None: all. Does not change the mask."""
        ...

    def append(self, token: int) -> None:
        """Note the turn's next token, which was allowed."""
        ...


def masked(logits: Tensor, masks: Sequence[TokenMask | None], temperature: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    """Logits [N, V] with -inf for tokens that are not allowed; the logarithm of the probability that is left, [N] float64; which
    rows have only one token left, [N] bool.

    pi_C(t) = pi(t) [t in A] / sum_{u in A} pi(u). temperature [N] float64, 0 (greedy) as 1. Raises ValueError for a mask that
    allows nothing.
    """
    left = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    forced = np.zeros(len(logits), dtype=bool)
    result = logits.clone()
    for row, mask in enumerate(masks):
        allowed = mask.allowed() if mask is not None else None
        if allowed is None:
            continue
        # A tokenizer may have tokens for which the model has no row: that of Gemma 3 has one for images.
        allowed = allowed[: logits.shape[-1]]
        count = int(allowed.sum())
        if not count:
            raise ValueError("a mask allows no token at all")
        kept = torch.zeros(logits.shape[-1], dtype=torch.bool)
        kept[: len(allowed)] = torch.from_numpy(allowed)
        kept = kept.to(logits.device)
        scaled = logits[row].double() / torch.where(temperature[row] == 0, 1.0, temperature[row])
        left[row] = scaled[kept].logsumexp(0) - scaled.logsumexp(0)
        result[row] = logits[row].masked_fill(~kept, float("-inf"))
        forced[row] = count == 1
    return result, left, forced


def compact(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """A set of token ids in the shorter of two forms: its ids, or -2 - id of those outside it; empty for all ids."""
    if len(tokens) <= vocabulary // 2:
        return tokens
    outside = np.ones(vocabulary, dtype=bool)
    outside[tokens] = False
    return (-2 - np.flatnonzero(outside)).astype(np.int32)


def owners_of(forced: Sequence[bool], mask: TokenMask) -> tuple[int, ...]:
    """`Turn.owners` of a turn under a mask, some of whose tokens were the only ones left."""
    if not mask.renormalise or not any(forced):
        return ()
    return tuple(int(Owner.FORCED if one else Owner.POLICY) for one in forced)
