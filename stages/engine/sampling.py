"""Draws one token per row: temperature, top-k and top-p over many rows at once, by inverse CDF from counter-based uniforms.

Each row is computed in float64 from its own logits and uniform number, so that a session's samples do not depend on its
neighbours. The log-probability returned is that of the sampled distribution: log softmax(logits / temperature), renormalised over
the support that top-k, then top-p leave.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def restrict(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set logits outside the sampling support to -inf.

    logits: [N, V] float64, already divided by the temperature; top_p: [N] in (0, 1]; top_k: [N], 0 for all.
    Top-k first, then top-p on what is left, renormalised: the smallest set of most likely tokens whose probability reaches
    top_p. Ties are broken by the lower token id.
    """
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(rank[None] >= limit[:, None], float("-inf"))
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability
    outside = (before >= top_p[:, None]) & (rank[None] > 0) & (top_p < 1.0)[:, None]
    ordered = ordered.masked_fill(outside, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def distribution(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Logits [N, V] float64 of the sampled distribution, up to a constant; -inf outside its support. Arguments as in `draw`;
    greedy rows have temperature 1 and the full support."""
    greedy = temperature == 0
    scaled = logits.double() / torch.where(greedy, 1.0, temperature)[:, None]
    restricted = bool((((top_p < 1.0) | (top_k > 0)) & ~greedy).any())
    return restrict(scaled, torch.where(greedy, 1.0, top_p), torch.where(greedy, 0, top_k)) if restricted else scaled


def draw_from(scaled: Tensor, greedy: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [N] int64 and log-probabilities [N] float32 of one draw per row of `distribution`; greedy: [N] bool."""
    peak, best = scaled.max(-1, keepdim=True)
    shifted = scaled - peak
    cumulative = shifted.exp().cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may lift u * total to total itself; the next lower number still selects a token of positive probability.
    threshold = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulative, threshold, right=True)
    token = torch.where(greedy[:, None], best, token)
    logprob = shifted.gather(-1, token) - total.log()
    return token[:, 0], logprob[:, 0].float()


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    logits: [N, V] of any float type; temperature: [N] float64, 0 for greedy; top_p: [N] float64; top_k: [N] int64;
    uniforms: [N] float64 in [0, 1). Returns token ids [N] int64 and their log-probabilities [N] float32. A greedy row takes
    the most likely token (the lowest id among equals) and reports its log-probability at temperature 1 on the full support.
    """
    return draw_from(distribution(logits, temperature, top_p, top_k), temperature == 0, uniforms)


def kept_tokens(scaled: Tensor) -> list[np.ndarray]:
    """The support of each row of `distribution`: token ids in ascending order, int32."""
    rows, tokens = scaled.isfinite().nonzero(as_tuple=True)
    ends = torch.bincount(rows, minlength=len(scaled)).cumsum(0)[:-1]
    return np.split(tokens.int().cpu().numpy(), ends.cpu().numpy())


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
