"""Draws one token per row: temperature, top-k and top-p over many rows at once, by inverse CDF from counter-based uniforms.

Each row is computed in float64 from its own logits and uniform number, so that a session's samples do not depend on its
neighbours. The log-probability returned is that of the sampled distribution: log softmax(logits / temperature), renormalised over
the support that top-k, then top-p leave. A vocabulary may have 262,144 tokens: one copy in float64 is made and changed in place,
and only tokens that can be in the support are sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LARGE, BLOCK, LEAST_BLOCK = 1 << 16, 512, 32
"""A vocabulary from LARGE on is divided into blocks of at most BLOCK tokens, if blocks of at least LEAST_BLOCK divide it."""


@dataclass(frozen=True)
class Distribution:
    """What one token of each of N rows is drawn from."""

    logits: Tensor
    """[N, V]"""
    divisor: Tensor
    """[N, 1] float64: the temperature, 1 in greedy rows."""
    greedy: Tensor
    """[N] bool"""
    peak: Tensor
    """[N, 1] float64: the largest of logits / divisor."""
    best: Tensor
    """[N, 1] int64: its token, the lowest id among equals."""
    weights: Tensor
    """[N, K] float64: exp(logits / divisor - peak), 0 outside the support."""
    ids: Tensor | None
    """[N, K] int64: the tokens of `weights`, ascending, then zeros; None: all V."""
    inside: Tensor | None
    """[N, K] bool: which of `ids` are in the support."""

    def shifted(self, tokens: Tensor) -> Tensor:
        """logits / divisor - peak of `tokens` [N, n], float64."""
        return self.logits.gather(-1, tokens).double() / self.divisor - self.peak

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Log-probabilities [N] float64 of one token per row, [N]; -inf outside the support."""
        found = (self.shifted(tokens[:, None]) - self.weights.sum(-1, keepdim=True).log())[:, 0]
        if self.ids is None or self.inside is None:
            return found
        return found.masked_fill(~((self.ids == tokens[:, None]) & self.inside).any(-1), float("-inf"))

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [N] int64 and log-probabilities [N] float32 of one draw per row; uniforms: [N] in [0, 1). It uses up the
        weights."""
        token, total = _invert(self.weights, uniforms)
        if self.ids is not None:
            token = self.ids.gather(-1, token)
        token = torch.where(self.greedy[:, None], self.best, token)
        return token[:, 0], (self.shifted(token) - total.log())[:, 0].float()

    def kept(self) -> list[np.ndarray]:
        """The support of each row: token ids in ascending order, int32."""
        rows, places = (self.logits.isfinite() if self.inside is None else self.inside).nonzero(as_tuple=True)
        tokens = places if self.ids is None else self.ids[rows, places]
        ends = torch.bincount(rows, minlength=len(self.logits)).cumsum(0)[:-1]
        return np.split(tokens.int().cpu().numpy(), ends.cpu().numpy())


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The place [N, 1] in `weights` [N, K] where their cumulative sum passes uniform * total, and the total [N, 1]. It uses up
    the weights. Of a large vocabulary, sums of blocks are cumulated, then the weights of one block."""
    size = weights.shape[-1]
    width = math.gcd(size, BLOCK) if size >= LARGE else 1
    if width < LEAST_BLOCK:
        cumulative = weights.cumsum_(-1)
        total = cumulative[:, -1:]
        return torch.searchsorted(cumulative, _below(uniforms[:, None] * total, total), right=True), total
    blocks = weights.unflatten(-1, (-1, width))
    sums = blocks.sum(-1)
    cumulative = _cumulated(sums)
    total = cumulative.amax(-1, keepdim=True)
    wanted = uniforms[:, None] * total
    block = _passed(cumulative, wanted)
    before = cumulative.gather(-1, block) - sums.gather(-1, block)
    own = _cumulated(blocks.take_along_dim(block[:, :, None], 1)[:, 0])
    return block * width + _passed(own, (wanted - before).clamp_(min=0.0)), total


def _cumulated(weights: Tensor) -> Tensor:
    """Cumulative sums of `weights` [N, K], 0 where a weight is 0. A GPU's need not ascend: one after a weight of 0 may be larger
    by a rounding error."""
    return weights.cumsum(-1).masked_fill_(weights == 0, 0.0)


def _passed(cumulative: Tensor, wanted: Tensor) -> Tensor:
    """The first place [N, 1] of each row of `_cumulated` sums [N, K] that is above `wanted` [N, 1]."""
    below = _below(wanted, cumulative.amax(-1, keepdim=True))
    return (cumulative > below).int().argmax(-1, keepdim=True)


def _below(wanted: Tensor, total: Tensor) -> Tensor:
    """`wanted`, which rounding may have lifted to the total itself, below it; that still selects a token of positive
    probability."""
    return torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))


def distribution(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Distribution:
    """The distribution of `draw`, with its arguments."""
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    weights = logits.to(torch.float64, copy=True).div_(divisor)
    peak, best = weights.max(-1, keepdim=True)
    weights.sub_(peak).exp_()
    whole = Distribution(logits, divisor, greedy, peak, best, weights, None, None)
    if not bool((((top_p < 1.0) | (top_k > 0)) & ~greedy).any()):
        return whole
    return _restricted(whole, torch.where(greedy, 1.0, top_p), torch.where(greedy, 0, top_k))


def _restricted(whole: Distribution, top_p: Tensor, top_k: Tensor) -> Distribution:
    """The distribution with the support of `draw`: the smallest set of most likely tokens whose probability reaches top_p, among
    the top_k most likely. Ties are broken by the lower token id."""
    ids, found = _candidates(whole, top_p, top_k)
    shifted = whole.shifted(ids).masked_fill_(~found, float("-inf"))
    ordered, order = torch.sort(shifted, dim=-1, descending=True, stable=True)
    rank = torch.arange(ids.shape[-1], device=ids.device)[None]
    limited = top_k[:, None] > 0
    ordered.masked_fill_(limited & (rank >= top_k[:, None]), float("-inf"))
    probability = ordered.exp()
    total = torch.where(limited, probability.sum(-1, keepdim=True), whole.weights.sum(-1, keepdim=True))
    probability.div_(total)
    before = probability.cumsum(-1) - probability
    outside = ((before >= top_p[:, None]) & (rank > 0) & (top_p < 1.0)[:, None]) | ordered.isneginf()
    inside = torch.empty_like(found).scatter_(-1, order, ~outside)
    weights = shifted.exp_().masked_fill_(~inside, 0.0)
    return Distribution(whole.logits, whole.divisor, whole.greedy, whole.peak, whole.best, weights, ids, inside)


def _candidates(whole: Distribution, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that include each row's support: ids [N, K], ascending and then zeros, and which are tokens, [N, K] bool.

    Tokens whose probability is below (1 - top_p) / V have less than 1 - top_p together, so the others reach top_p. Where top_k is
    set, all tokens as likely as the top_k-th.
    """
    weights, size = whole.weights, whole.weights.shape[-1]
    # Half of the bound, so that rounding excludes no token of the support.
    least = (0.5 * (1.0 - top_p) / size)[:, None] * weights.sum(-1, keepdim=True)
    if most := min(int(top_k.max()), size):
        limits = weights.topk(most, -1).values.gather(-1, (top_k.clamp(1, most) - 1)[:, None])
        least = torch.where(top_k[:, None] > 0, limits, least)
    rows, tokens = (weights >= least).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(weights))
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    ids = rows.new_zeros(len(weights), int(counts.max()))
    ids[rows, place] = tokens
    return ids, torch.arange(ids.shape[-1], device=ids.device)[None] < counts[:, None]


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    logits: [N, V] of any float type; temperature: [N] float64, 0 for greedy; top_p: [N] float64 in (0, 1]; top_k: [N] int64,
    0 for all; uniforms: [N] float64 in [0, 1). Returns token ids [N] int64 and their log-probabilities [N] float32. Top-k comes
    first, then top-p on what is left, renormalised. A greedy row takes the most likely token (the lowest id among equals) and
    reports its log-probability at temperature 1 on the full support.
    """
    return distribution(logits, temperature, top_p, top_k).draw(uniforms)


def candidate_entropy(logits: Tensor, temperature: Tensor, candidates: Tensor) -> Tensor:
    """-sum p log p over each row's `candidates` most likely tokens, nats, float32 [N]; p is not renormalised over them.

    logits: [N, V]; temperature: [N] float64 (0: as 1); candidates: [N] int64, 0 gives 0.
    """
    logs = (logits.double() / torch.where(temperature == 0, 1.0, temperature)[:, None]).log_softmax(-1)
    most = logs.topk(min(max(int(candidates.max()), 1), logs.shape[-1]), -1).values
    # Tokens that a mask leaves out have probability 0, and 0 log 0 is 0.
    most = torch.where(most.isfinite(), most, 0.0) if not bool(most.isfinite().all()) else most
    counted = torch.arange(most.shape[-1], device=logits.device)[None] < candidates[:, None]
    return -(most.exp() * most * counted).sum(-1).float()
