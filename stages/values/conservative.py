"""The regulariser of conservative Q-learning (Kumar et al., arXiv 2006.04779; as used by arXiv 2403.03950, equation 2.4)."""

from __future__ import annotations

import torch
from torch import Tensor


def conservative(q: Tensor, data: Tensor) -> Tensor:
    """logsumexp_a Q(s, a) - E_{a ~ data} Q(s, a): [...] from values q [..., A] and the data's action probabilities [..., A].

    Actions at -inf are not to be had. It holds down the values of actions that the data lack, which bootstrapping would otherwise
    overrate. For tokens and one-hot data it is the cross-entropy of softmax(Q) with the token that came next.
    """
    taken = torch.where(data > 0, data * q, torch.zeros((), dtype=q.dtype, device=q.device))
    return torch.logsumexp(q, dim=-1) - taken.sum(-1)
