"""The regulariser of conservative Q-learning (Kumar et al., arXiv 2006.04779; as used by arXiv 2403.03950, equation 2.4)."""

from __future__ import annotations

import torch
from torch import Tensor


def conservative(q: Tensor, data: Tensor) -> Tensor:
    """logsumexp_a Q(s, a) - E_{a ~ data} Q(s, a): [...] from values q [..., A] and the data's action probabilities [..., A].

    Actions at -inf are unavailable. It lowers the values of actions that are not in the data, which bootstrapping would otherwise
    overestimate. For tokens and one-hot data it is the cross-entropy of softmax(Q) with the next token.
    """
    taken = torch.where(data > 0, data * q, torch.zeros((), dtype=q.dtype, device=q.device))
    return torch.logsumexp(q, dim=-1) - taken.sum(-1)
