"""ARPO's reward (arXiv 2507.19849): format first, then the answer, then a bonus for having used several tools to get there."""

from __future__ import annotations

import torch
from torch import Tensor


def hierarchical(scores: Tensor, well_formed: Tensor, tools: Tensor, penalty: float, bonus: float) -> Tensor:
    """`penalty` where the format is bad; else the score, and `bonus` more where it is above 0 and at least two different tools
    were called. All [B]; scores in [0, 1], well_formed bool, tools int64. The largest reward is 1 + bonus."""
    paid = scores + bonus * ((scores > 0) & (tools >= 2))
    return torch.where(well_formed, paid, torch.full_like(paid, penalty))
