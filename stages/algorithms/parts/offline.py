"""Shared parts of methods that learn from an offline dataset: settings, the batch, the networks' scores, loss terms.

Every loss is a weighted sum over tokens. Weights are computed over the entire optimiser step, so that the split into
micro-batches changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from stages.algorithms.batch import Extra
from stages.runtime.validation import Count, NonNegative, Section, Share

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Discount = Annotated[float, Field(gt=0.0, le=1.0)]


class OfflineSettings(Section):
    """Keys of rl.settings that all these methods have."""

    per_step: Count = 64
    """Episodes per optimiser step."""
    real_share: Share = 0.5
    """Share of ground truth among them: the expert's demonstrations and other known solutions."""
    other_share: Share = 0.25
    """Share of episodes by others among them: known mistakes, recorded games, noisy demonstrations. The rest are the SFT policy's
    own rollouts. A kind without episodes is replaced by the others."""
    beta_ce: NonNegative = 0.5
    """Weight of the negative log-probability of the ground truth."""

    @model_validator(mode="after")
    def _shares(self) -> OfflineSettings:
        if self.real_share + self.other_share > 1:
            raise ValueError(f"real_share ({self.real_share:g}) and other_share ({self.other_share:g}) sum to more than 1")
        return self


@dataclass(frozen=True)
class OfflineBatch(Extra):
    """B episodes, padded on the right to T tokens."""

    PER_TOKEN = ("token_ids", "mask", "rewards", "logprobs_ref", "best_ref", "greedy")

    token_ids: Tensor
    """[B, T] int64."""
    mask: Tensor
    """[B, T] bool: tokens chosen by the player of the episode."""
    rewards: Tensor
    """[B, T] float32: each turn's reward, on its last token."""
    real: Tensor
    """[B] bool: whether the episode is ground truth."""
    baseline: Tensor
    """[B] float32: mean return of the SFT policy's own episodes of the task (of all tasks, if it has none)."""
    weight: Tensor
    """[B] float32: weight of each token's term, 1 / (tokens of the episode * episodes of the step)."""
    real_weight: Tensor
    """[B] float32: the same over the step's ground truth only, 0 for other episodes."""
    logprobs_ref: Tensor
    """[B, T] float32: log-probabilities of the tokens under the frozen SFT policy."""
    best_ref: Tensor
    """[B, T] float32: log-probabilities of that policy's most likely tokens at the same positions."""
    greedy: Tensor
    """[B, T] int64: these most likely tokens; the lowest id among equals."""

    def take(self, rows: list[int], device: torch.device | str = "cpu") -> OfflineBatch:
        """The batch of some rows, cut to their longest, on `device`."""
        import torch

        picked = self.rows(torch.tensor(rows))
        return picked.cut(int((picked.mask * torch.arange(1, picked.mask.shape[1] + 1)).amax()), device)

    @property
    def returns(self) -> Tensor:
        return self.rewards.sum(1)


@dataclass(frozen=True)
class Scores:
    """The networks' outputs on an OfflineBatch, [B, T] float32 each, 0 off the mask; None where they were not computed."""

    logprobs: Tensor | None = None
    """The policy's log-probabilities of the tokens, with gradient."""
    best: Tensor | None = None
    """Its log-probabilities of its own most likely tokens."""
    greedy: Tensor | None = None
    """Its log-probabilities of the frozen SFT policy's most likely tokens."""
    value: Tensor | None = None
    """The value network's output, before it is bounded."""
    residual: Tensor | None = None
    """The residual head's output, which is added to `value`."""


def required(scores: Tensor | None) -> Tensor:
    """A tensor of `Scores`. Raises ValueError if it was not computed."""
    if scores is None:
        raise ValueError("an offline loss reads scores that were not computed")
    return scores


@dataclass(frozen=True)
class ValueFit:
    """Values and what was earned after them, [B, T] each, whose correlation says what a value network has learned. Its
    temporal-difference error does not: with gamma 1, the squared errors of a network that knows no more than the mean return add
    up to the variance of returns, and so do those of one that learns the outcome token by token."""

    value: Tensor
    earned: Tensor

    def moments(self) -> dict[str, Tensor]:
        """Products whose means over tokens `correlation` reads, [B, T] each."""
        value, earned = self.value.double(), self.earned.double()
        return {
            "value": value,
            "earned": earned,
            "value_squared": value**2,
            "earned_squared": earned**2,
            "value_earned": value * earned,
        }

    @staticmethod
    def correlation(means: Mapping[str, float]) -> float:
        """Pearson's correlation from the means of `moments`; 0 where one of the two does not vary."""
        covariance = means["value_earned"] - means["value"] * means["earned"]
        variances = (means[f"{name}_squared"] - means[name] ** 2 for name in ("value", "earned"))
        scale = math.sqrt(math.prod(max(variance, 0.0) for variance in variances))
        return covariance / scale if scale > 1e-6 else 0.0


def weighted_sum(per_token: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    """Sum of weight [B] times per_token [B, T] over the mask."""
    return (per_token.where(mask, 0.0).sum(1) * weight).sum()


def imitation(logprobs: Tensor, batch: OfflineBatch) -> Tensor:
    """Mean over the ground truth of the mean negative log-probability of its tokens."""
    return weighted_sum(-logprobs, batch.mask, batch.real_weight)
