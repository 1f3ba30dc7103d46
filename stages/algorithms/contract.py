"""The contract of every RL method: small pure functions over one `TrajectoryBatch`, put together from switches.

Order: reward shaping -> batch filling -> advantage (mean, std, credit) -> step credit -> policy loss -> aggregation.
A published method is a `Composition` (a named choice for each part) plus its own pieces, with a `Card`. Denominators are taken
over the whole batch before it is split into micro-batches, so the split never changes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrajectoryBatch:
    """B episodes, padded on the right to T tokens. Everything is known before the update; nothing in here has a gradient."""

    token_ids: Tensor
    """[B, T] int64."""
    lengths: Tensor
    """[B] int64: real tokens per row."""
    mask: Tensor
    """[B, T] bool: policy tokens; the ones that are trained on."""
    turn: Tensor
    """[B, T] int64: turn index of a token, -1 for prompt and padding."""
    logprobs_old: Tensor
    """[B, T] float32: behaviour policy's log-probabilities (0 off the mask)."""
    group: Tensor
    """[B] int64: index of the episode's group."""
    rewards: Tensor
    """[B] float32: returns after shaping."""
    turn_rewards: Tensor
    """[B, U] float32: reward of each turn, 0 past the end."""
    turns: Tensor
    """[B] int64: number of turns."""
    truncated: Tensor
    """[B] bool."""
    logprobs_ref: Tensor | None = None
    """[B, T] float32 under the frozen reference, where a KL term is on."""
    values: Tensor | None = None
    """[B, T] float32: critic's value of the state before each token, where the method has a critic."""
    turn_values: Tensor | None = None
    """[B, U + 1] float32: annotated step-value model's V before each turn and after the last (0 if terminated)."""
    advantages: Tensor | None = None
    """[B, T] float32, set by the advantage parts; 0 off the mask."""
    returns: Tensor | None = None
    """[B, T] float32: the critic's targets, where there is one."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """A method's own tensors, first dimension B."""

    def with_(self, **changes: Any) -> TrajectoryBatch:
        return replace(self, **changes)

    def rows(self, index: Tensor) -> TrajectoryBatch:
        """The rows in `index` ([b] int64), all fields; `group` keeps its numbers."""
        picked: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            picked[name] = value[index] if isinstance(value, Tensor) else value
        picked["extra"] = {key: value[index] for key, value in self.extra.items()}
        return TrajectoryBatch(**picked)

    @property
    def size(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True)
class Denominators:
    """Taken over the whole batch before micro-batching. See `aggregation`."""

    tokens: float
    sequences: float
    turns: float
    constant: float


@dataclass(frozen=True)
class LossTerms:
    """One micro-batch's share of the loss (a scalar with gradient, summed over micro-batches) and its statistics (sums)."""

    loss: Tensor
    sums: dict[str, Tensor]
    trained: tuple[Tensor, Tensor] | None = None
    """Which tokens this trains, for the ledger: rows [b] int64 of the batch, and their mask [b, t] bool."""


PolicyLoss = Callable[[Tensor, TrajectoryBatch, Any], Tensor]
"""(logprobs [b, T] with gradient, batch, loss parameters) -> per-token loss [b, T], 0 off the mask."""

Advantage = Callable[[TrajectoryBatch, Any], TrajectoryBatch]
"""(batch, algorithm parameters) -> batch with `advantages` (and `returns`) set."""


@dataclass(frozen=True)
class Card:
    """What a method's module opens with; README's method table is made from these."""

    slug: str
    title: str
    paper: str
    equation: str
    assumptions: str
    reduces_to: str
    tested_by: str
    switch: str


@dataclass(frozen=True)
class Composition:
    """A named method: overrides of `params.yaml` (section `rl`, dotted keys) that its name stands for."""

    card: Card
    parts: Mapping[str, Any]
    needs_critic: bool = False


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask`; 0 if nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit standard deviation over `mask`; 0 elsewhere."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return torch.where(mask, (values - mean) / (variance + eps).sqrt(), torch.zeros_like(values))
