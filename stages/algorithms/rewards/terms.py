"""Terms that are added to an episode's outcome: tool calls and length (Yu et al., arXiv 2510.11701, equations 8 and 9)."""

from __future__ import annotations

import torch
from torch import Tensor


def with_tool_bonus(rewards: Tensor, success: Tensor, calls: Tensor, bonus: float, on: str, cap: float | None) -> Tensor:
    """rewards + bonus * calls for failures, never above `cap`; on: `both` pays successes too (the paper's equation, without a
    cap; `wrong` is its code). All tensors [B]."""
    paid = rewards + bonus * calls
    failed = paid if cap is None else torch.minimum(paid, torch.maximum(torch.full_like(paid, cap), rewards))
    return torch.where(success, paid if on == "both" else rewards, failed)


def overlong_term(lengths: Tensor, longest: int, cache: int, penalty: float) -> Tensor:
    """0 up to longest - cache tokens, then falling linearly to -penalty at `longest`, and no lower: [B] from lengths [B]."""
    over = (lengths - (longest - cache)).float() / cache
    return -penalty * over.clamp(0.0, 1.0)
