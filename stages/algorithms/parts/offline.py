"""What methods that learn from stored episodes, off-policy, share: a batch of them, what networks say of it, two plain losses.

Every loss is a sum of weighted terms per token; weights are taken over the whole optimiser step, so that the split into
micro-batches changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor

from stages.runtime.validation import Count, NonNegative, Section, Share


class StoredSettings(Section):
    """Keys of rl.settings that all of these methods have."""

    per_step: Count = 64
    """Episodes in one optimiser step."""
    real_share: Share = 0.5
    """Of these, ground truth: the expert's demonstrations and other solutions that are known."""
    other_share: Share = 0.25
    """... and what others did: known mistakes, records of others' games, noisy demonstrations. The rest are the SFT policy's own,
    of rollout. Where there is none of a kind, the others fill its place."""
    beta_ce: NonNegative = 0.5
    """Weight of the negative log-probability of the ground truth."""

    @model_validator(mode="after")
    def _shares(self) -> StoredSettings:
        if self.real_share + self.other_share > 1:
            raise ValueError(f"real_share ({self.real_share:g}) and other_share ({self.other_share:g}) come to more than 1")
        return self


Discount = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True)
class StoredBatch:
    """d episodes, padded on the right to T tokens."""

    token_ids: Tensor
    """[d, T] int64."""
    mask: Tensor
    """[d, T] bool: tokens that were chosen, by whomever."""
    rewards: Tensor
    """[d, T] float32: of a turn, on its last token."""
    real: Tensor
    """[d] bool: ground truth."""
    baseline: Tensor
    """[d] float32: mean return of the SFT policy's own episodes at the task (at all tasks, where it has none)."""
    weight: Tensor
    """[d] float32: of each token's term, 1 / (tokens of the episode * episodes of the step)."""
    real_weight: Tensor
    """[d] float32: the same over the step's ground truth alone, 0 for others."""
    logprobs_ref: Tensor
    """[d, T] float32: log-probabilities of the tokens under the frozen SFT policy, ..."""
    best_ref: Tensor
    """[d, T] float32: ... of the likeliest tokens in their places, and ..."""
    greedy: Tensor
    """[d, T] int64: ... which those are; the lowest of equals."""

    def rows(self, index: list[int], device: torch.device | str = "cpu") -> StoredBatch:
        """Some episodes, cut to the longest."""
        chosen = torch.tensor(index)
        width = int((self.mask[chosen] * torch.arange(1, self.mask.shape[1] + 1)).amax())
        picked = {
            name: (value[chosen] if value.dim() == 1 else value[chosen, :width]).to(device) for name, value in vars(self).items()
        }
        return replace(self, **picked)

    @property
    def returns(self) -> Tensor:
        return self.rewards.sum(1)


@dataclass(frozen=True)
class Scores:
    """What the networks say of a StoredBatch's tokens, [d, T] float32 each, 0 off the mask; None where they were not asked."""

    logprobs: Tensor | None = None
    """The policy's, of the tokens, with gradient."""
    best: Tensor | None = None
    """... of its likeliest tokens, ..."""
    greedy: Tensor | None = None
    """... and of the frozen SFT policy's likeliest tokens."""
    value: Tensor | None = None
    """The value network's output, before it is bounded."""
    residual: Tensor | None = None
    """What the policy's learner adds to that."""


def asked(found: Tensor | None) -> Tensor:
    """A tensor of `Scores`. Raises ValueError if the networks were not asked for it."""
    if found is None:
        raise ValueError("a loss on stored episodes reads what the networks were not asked for")
    return found


def weighted(per_token: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    """Sum of weight [d] times per_token [d, T] over the mask."""
    return (torch.where(mask, per_token, torch.zeros_like(per_token)).sum(1) * weight).sum()


def imitation(logprobs: Tensor, batch: StoredBatch) -> Tensor:
    """Mean over the ground truth of the mean negative log-probability of its tokens."""
    return weighted(-logprobs, batch.mask, batch.real_weight)
