"""Masks over tokens: what may come next in a turn, as the turn grows. The engines of this process apply them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stages.records.episode import Owner

BLOCK = 1 << 20
"""Logits that are masked at once, about: a bound on memory where the vocabulary is large."""


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


def _blocks(rows: list[int], size: int) -> Iterator[list[int]]:
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def masked(logits: Tensor, masks: Sequence[TokenMask | None], temperature: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    """Logits [N, V] with -inf for tokens that are not allowed; the logarithm of the probability that is left, [N] float64; which
    rows have only one token left, [N] bool.

    pi_C(t) = pi(t) [t in A] / sum_{u in A} pi(u). temperature [N] float64, 0 (greedy) as 1. Raises ValueError for a mask that
    allows nothing.
    """
    left = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    forced = np.zeros(len(logits), dtype=bool)
    result = logits.clone()
    sets = {row: allowed for row, mask in enumerate(masks) if mask is not None and (allowed := mask.allowed()) is not None}
    width = logits.shape[-1]
    for rows in _blocks(list(sets), max(1, BLOCK // width)):
        kept = np.zeros((len(rows), width), dtype=bool)
        for place, row in enumerate(rows):
            # A tokenizer may have tokens for which the model has no row: that of Gemma 3 has one for images.
            kept[place, : min(width, len(sets[row]))] = sets[row][:width]
        counts = kept.sum(1)
        if not counts.all():
            raise ValueError("a mask allows no token at all")
        index, banned = torch.tensor(rows, device=logits.device), torch.from_numpy(~kept).to(logits.device)
        scale = temperature[index][:, None]
        scaled = logits[index].double() / torch.where(scale == 0, 1.0, scale)
        left[index] = scaled.masked_fill(banned, float("-inf")).logsumexp(1) - scaled.logsumexp(1)
        result[index] = logits[index].masked_fill(banned, float("-inf"))
        forced[rows] = counts == 1
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
