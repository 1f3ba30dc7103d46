"""Formulas of reward shaping, pure functions on tensors; parts/reward.py applies them to a batch. Light to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.runtime.validation import NonNegative, Section, Share

if TYPE_CHECKING:
    from torch import Tensor


class PrsStage(Section):
    """One stage of progressive reward shaping; its score counts once all earlier stages have reached their thresholds."""

    name: str
    """Name of the stage, and of its term unless `term` is given."""
    weight: NonNegative
    """Weight of the stage's score in the reward."""
    threshold: Share = 1.0
    """Score from which the next stage counts."""
    term: str | None = None
    """The scored term: `parse` (share of accepted actions; 0 if the episode ran out of tokens), `tool` (1 if a tool was called),
    `outcome` (the environment's return) or a reward term of the environment. null: the stage's name."""
    no_call_score: Share = 1.0
    """`tool`: the score of an episode without a call."""


def staged(scores: Tensor, weights: Sequence[float], thresholds: Sequence[float]) -> Tensor:
    """Progressive reward shaping (Su et al., arXiv 2512.07478): R = sum_k w_k s_k prod_{j<k} 1[s_j >= tau_j], [B] from scores
    [B, K] in [0, 1]. The order of the stages is the paper's (format, tool call, answer); the formula is ours."""
    import torch

    passed = scores >= torch.tensor(thresholds, dtype=scores.dtype)
    reached = torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], 1).long().cumprod(1)
    return (scores * reached * torch.tensor(weights, dtype=scores.dtype)).sum(1)


def hierarchical(scores: Tensor, well_formed: Tensor, tools: Tensor, penalty: float, bonus: float) -> Tensor:
    """ARPO's reward (arXiv 2507.19849): `penalty` for invalid format; else the score, plus `bonus` if it is above 0 and at least
    two different tools were called. All [B]; scores in [0, 1], well_formed bool, tools int64. The largest reward is 1 + bonus."""
    import torch

    paid = scores + bonus * ((scores > 0) & (tools >= 2))
    return torch.where(well_formed, paid, torch.full_like(paid, penalty))


def single(success: Tensor, turns: Tensor, width: int) -> Tensor:
    """Sparse rewards: 1 on the last turn of a success, else 0, [B, U] from success [B] bool and turns [B]; width: U."""
    import torch

    last = torch.arange(width, device=turns.device)[None, :] == (turns - 1)[:, None]
    return (last & success[:, None]).float()


def dense(increments: Tensor, success: Tensor, divisor: str, max_total: float) -> Tensor:
    """Dense rewards (Wang and Ammanabrolu, arXiv 2510.01132): the environment's increments [B, U] divided by one number per
    episode.

    max_total: the same for all, so that no failure earns more than a success. reference, as in the paper's code: the number of
    positive increments (at least 1) of a success, `max_total` for a failure.
    """
    import torch

    divisors = torch.full_like(increments[:, 0], max_total)
    if divisor == "reference":
        divisors = torch.where(success, (increments > 0).sum(1).clamp(min=1).float(), divisors)
    return increments / divisors[:, None]


def with_tool_bonus(rewards: Tensor, success: Tensor, calls: Tensor, bonus: float, on: str, cap: float | None) -> Tensor:
    """rewards + bonus * calls for failures, at most `cap` (Yu et al., arXiv 2510.11701, equation 8); on: `both` adds it to
    successes too (the paper's equation, without a cap; `wrong` is its code). All tensors [B]."""
    import torch

    paid = rewards + bonus * calls
    failed = paid if cap is None else torch.minimum(paid, torch.maximum(torch.full_like(paid, cap), rewards))
    return torch.where(success, paid if on == "both" else rewards, failed)


def overlong_term(lengths: Tensor, longest: int, cache: int, penalty: float) -> Tensor:
    """The length penalty (equation 9 there): 0 up to longest - cache tokens, then linear down to -penalty at `longest` and
    beyond, [B] from lengths [B]."""
    over = (lengths - (longest - cache)).float() / cache
    return -penalty * over.clamp(0.0, 1.0)
