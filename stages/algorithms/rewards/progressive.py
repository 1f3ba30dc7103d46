"""Progressive reward shaping (Su et al., arXiv 2512.07478): what comes later counts once what comes before is right.

The order of the stages is the paper's (format and tool call first, then the answer); the algebra is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def staged(scores: Tensor, weights: Sequence[float], thresholds: Sequence[float]) -> Tensor:
    """R = sum_k w_k s_k prod_{j<k} 1[s_j >= tau_j]: [B] from scores [B, K] in [0, 1]."""
    passed = scores >= torch.tensor(thresholds, dtype=scores.dtype)
    reached = torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], 1).long().cumprod(1)
    return (scores * reached * torch.tensor(weights, dtype=scores.dtype)).sum(1)
