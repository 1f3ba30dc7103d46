"""The loss on observation tokens: the policy also learns to predict what the environment answers.

ECHO (Shrivastava et al., arXiv 2605.24517): L = L_policy + coef * mean over observation tokens of -log pi(o_t | all before it).
Both losses read the logits of one forward pass. Each has its own denominator, so that long observations do not dilute the
policy's loss.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stages.agent.logprobs import TokenScores
from stages.algorithms.batch import LossTerms, Observed, TrajectoryBatch
from stages.training.common.batches import trained_lengths


def observed_tokens(batch: TrajectoryBatch) -> Tensor:
    """The observation tokens that a pass over the batch reads, [B, T] bool: those before a row's last trained token. Raises
    ValueError if the batch has no record of them."""
    observed = batch.get(Observed)
    if observed is None:
        raise ValueError("the batch has no record of the environment's tokens; make it with trajectory_batch")
    positions = torch.arange(batch.mask.shape[1], device=batch.mask.device)
    return observed.mask & (positions < trained_lengths(batch.mask)[:, None])


def observed_weight(batch: TrajectoryBatch) -> float:
    """The number of observation tokens of the batch, rows weighted: the loss's denominator."""
    return float((observed_tokens(batch) * batch.weights[:, None]).sum())


def on_policy_tokens(scores: TokenScores, mask: Tensor) -> TokenScores:
    """Scores of a pass over more tokens, 0 off `mask` [b, T]."""

    def only(values: Tensor) -> Tensor:
        return torch.where(mask, values, torch.zeros_like(values))

    vocabulary, entropy = scores.vocabulary, scores.entropy
    if vocabulary is not None:
        vocabulary = replace(vocabulary, mean=only(vocabulary.mean), normaliser=only(vocabulary.normaliser))
    return TokenScores(only(scores.logprobs), None if entropy is None else only(entropy), vocabulary)


def with_observations(terms: LossTerms, logprobs: Tensor, batch: TrajectoryBatch, total: float, coef: float) -> LossTerms:
    """The policy's terms of a micro-batch with its share of the loss on observation tokens.

    logprobs [b, T]: of trained and observation tokens; total: `observed_weight` of the optimiser step.
    """
    weights = observed_tokens(batch) * batch.weights[:, None]
    negative = -(logprobs * weights).sum()
    sums = {**terms.sums, "observation_loss": negative.detach(), "observation_tokens": weights.sum()}
    return replace(terms, loss=terms.loss + coef * negative / max(total, 1.0), sums=sums)
