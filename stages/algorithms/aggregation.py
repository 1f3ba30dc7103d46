"""From per-token losses to one number. Denominators are taken over the whole batch of an optimiser step before it is split into
micro-batches, so each micro-batch contributes its share of a sum and the split never changes loss or gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.batch import Denominators, TrajectoryBatch


def denominators(batch: TrajectoryBatch, constant_length: float) -> Denominators:
    """Counts over the whole batch: policy tokens, and episodes that have any (an episode without policy tokens counts nowhere),
    each counted by the row's weight; and `constant` = episodes * constant_length (Dr. GRPO's divisor, as TRL takes it). Never
    below 1."""
    weights = batch.weights.double()
    tokens = float((batch.mask.sum(1) * weights).sum())
    sequences = float((batch.mask.any(1) * weights).sum())
    return Denominators(
        tokens=max(tokens, 1.0),
        sequences=max(sequences, 1.0),
        constant=max(sequences, 1.0) * constant_length,
    )


def aggregate(loss: Tensor, mask: Tensor, kind: str, total: Denominators, weight: Tensor | None = None) -> Tensor:
    """This micro-batch's share (a scalar) of per-token losses [b, T] over mask [b, T], rows counted `weight` [b] times; the
    shares of all micro-batches sum to:

    token_mean: sum over tokens / tokens. seq_mean_token_mean: mean over episodes of their token means.
    seq_mean_token_sum: mean over episodes of their token sums. constant: sum over tokens / (episodes * a constant length).
    """
    masked = torch.where(mask, loss, torch.zeros_like(loss))
    if weight is not None:
        masked = masked * weight[:, None]
    if kind == "token_mean":
        return masked.sum() / total.tokens
    if kind == "seq_mean_token_mean":
        return (masked.sum(1) / mask.sum(1).clamp(min=1)).sum() / total.sequences
    if kind == "seq_mean_token_sum":
        return masked.sum() / total.sequences
    if kind == "constant":
        return masked.sum() / total.constant
    raise ValueError(
        f"unknown rl.loss.aggregation '{kind}'; known: token_mean, seq_mean_token_mean, seq_mean_token_sum, constant"
    )
