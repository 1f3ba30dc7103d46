"""The contract of every RL method: small pure functions over one `TrajectoryBatch`, put together from switches.

Order: reward shaping -> batch filling -> advantage (level, mean, std) -> step credit -> policy loss -> aggregation.
A published method is a `Composition` (a named choice for each part) with pieces of its own and a `Card`, see card.py here.
Denominators are taken over the whole batch before it is split into micro-batches, so the split never changes the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

ENDED, CUT, INVALID = -2, -3, -2
"""Numbers in `TrajectoryBatch.states` (ENDED, CUT) and `actions` (INVALID) that stand for no key of the environment."""


@dataclass(frozen=True)
class TrajectoryBatch:
    """B episodes, padded on the right to T tokens. Everything is known before the update; nothing in here has a gradient."""

    token_ids: Tensor
    """[B, T] int64."""
    lengths: Tensor
    """[B] int64: real tokens per row."""
    mask: Tensor
    """[B, T] bool: the tokens that are trained on: the policy's, and those of external episodes."""
    turn: Tensor
    """[B, T] int64: turn index of a token, -1 for prompt and padding."""
    logprobs_old: Tensor
    """[B, T] float32: log-probabilities before the step's first update (0 off the mask): of the policy that drew the tokens; on
    external tokens, whose behaviour policy nobody knows, the policy's own, computed before training."""
    group: Tensor
    """[B] int64: index of the episode's group."""
    rewards: Tensor
    """[B] float32: returns after shaping (before any KL penalty)."""
    turn_rewards: Tensor
    """[B, U] float32: reward of each turn, 0 past the end; they sum to `rewards`."""
    turns: Tensor
    """[B] int64: number of turns."""
    truncated: Tensor
    """[B] bool: the turn limit or a lack of tokens cut the episode."""
    logprobs_drawn: Tensor | None = None
    """[B, T] float32: log-probabilities as the engine drew the tokens, where `logprobs_old` were computed anew by the training
    pass."""
    mean_logprobs_old: Tensor | None = None
    """[B, T] float32: mean over the vocabulary of the log-probabilities before each token, of the policy before the step's first
    update, where the method compares with it; 0 off the mask."""
    external: Tensor | None = None
    """[B, T] bool: tokens of the mask that somebody else wrote (demonstrations). None: there are none."""
    vocabulary: int | None = None
    """Tokens that the policy chooses among, where there are external ones."""
    members: Tensor | None = None
    """[B] int64: rows of the group that are trained on, where the method needs whole groups."""
    overlong: Tensor | None = None
    """[B] bool: it ran out of tokens."""
    success: Tensor | None = None
    """[B] bool: the environment's return reached 1."""
    accepted: Tensor | None = None
    """[B, U] bool: the environment understood the turn's action; True past the end."""
    tool_calls: Tensor | None = None
    """[B] float32: sum of the turns' costs."""
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] float32 each: the environment's reward terms, and the stages of progressive shaping."""
    weight: Tensor | None = None
    """[B] float32, set by batch filling: how many times a row counts, in losses, denominators and statistics over the batch; 0:
    it is left out. None: once each."""
    smoothing: Tensor | None = None
    """[B] float32, set by batch filling: factor on the row's advantages. None: 1."""
    greedy_rewards: Tensor | None = None
    """[B] float32: shaped return of the greedy episode of the row's task, where that is the baseline."""
    token_rewards: Tensor | None = None
    """[B, T] float32: rewards per policy token beside `turn_rewards` (the KL penalty), 0 off the mask."""
    logprobs_ref: Tensor | None = None
    """[B, T] float32 under the frozen reference, where a KL term is on."""
    values: Tensor | None = None
    """[B, T] float32: critic's value of the state before each token, where the method has a critic."""
    turn_values: Tensor | None = None
    """[B, U + 1] float32: annotated step-value model's V before each turn and after the last (0 if terminated)."""
    turn_progress: Tensor | None = None
    """[B, U] float32: what the progress estimator says each turn contributed to the return; 0 past the end."""
    turn_q: Tensor | None = None
    """[B, U, 2] float32: what the twins of the critic of utterances say a turn's action is worth, where the method has it; 0
    past the end."""
    turn_v: Tensor | None = None
    """[B, U, 2] float32: ... and the history before it."""
    states: Tensor | None = None
    """[B, U + 1] int64: state before each turn and after the last, equal where the environment's state keys are. ENDED and CUT
    after the last turn of an episode that ended by its own rules or was cut; -1 past that."""
    actions: Tensor | None = None
    """[B, U] int64: each turn's action, equal where action keys are; INVALID where the environment did not understand it; -1
    past the end."""
    state_names: tuple[str, ...] = ()
    """State keys by their numbers in `states`."""
    draws: Tensor | None = None
    """[B, U] int64: turns that branches took over from one another have the number of the one draw that they stem from; -1 past
    the end."""
    tools: Tensor | None = None
    """[B] int64: number of different tools called (first words of actions that cost something)."""
    advantages: Tensor | None = None
    """[B, T] float32, set by the advantage parts; 0 off the mask."""
    returns: Tensor | None = None
    """[B, T] float32: the critic's targets, where there is one."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """A method's own tensors, first dimension B."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the parts have to tell about the whole batch; columns of the history."""

    def with_(self, **changes: Any) -> TrajectoryBatch:
        return replace(self, **changes)

    def rows(self, index: Tensor) -> TrajectoryBatch:
        """The rows in `index` ([b] int64), all fields; `group` keeps its numbers."""
        picked: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            picked[name] = value[index] if isinstance(value, Tensor) else value
        for name in ("extra", "terms"):
            picked[name] = {key: value[index] for key, value in picked[name].items()}
        return TrajectoryBatch(**picked)

    @property
    def weights(self) -> Tensor:
        """`weight`, [B] float32, 1 where it is None."""
        return torch.ones(self.size, device=self.mask.device) if self.weight is None else self.weight

    @property
    def policy_mask(self) -> Tensor:
        """Tokens of the mask that the policy wrote itself, [B, T] bool."""
        return self.mask if self.external is None else self.mask & ~self.external

    def with_metrics(self, **metrics: float) -> TrajectoryBatch:
        """The batch with further `metrics`."""
        return replace(self, metrics={**self.metrics, **metrics})

    @property
    def size(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True)
class LossTerms:
    """One micro-batch's share of the loss (a scalar with gradient, summed over micro-batches) and its statistics (sums)."""

    loss: Tensor
    sums: dict[str, Tensor]
    trained: tuple[Tensor, Tensor] | None = None
    """Which tokens this trains, for the ledger: rows [b] int64 of the batch, and their mask [b, t] bool."""


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` over `mask` (bool, or weights >= 0); 0 if that is 0 everywhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, weight: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit standard deviation over `mask` [B, T], rows counted `weight` [B] times; 0 elsewhere."""
    counts = mask if weight is None else mask * weight[:, None]
    mean = masked_mean(values, counts)
    variance = masked_mean((values - mean) ** 2, counts)
    return torch.where(mask, (values - mean) / (variance + eps).sqrt(), torch.zeros_like(values))


def next_token_values(values: Tensor, mask: Tensor, turn: Tensor | None = None) -> Tensor:
    """`values` [b, T] at the next token of the row in `mask` [b, T], for each token of the mask; 0 after the last one and off the
    mask. With turn [b, T]: also 0 after the last token of each turn."""
    width = mask.shape[1]
    positions = torch.arange(width, device=mask.device).expand_as(mask)
    # The first masked position at or after each position, then strictly after it; `width` where there is none.
    first = torch.where(mask, positions, width).flip(1).cummin(1).values.flip(1)
    after = torch.cat([first[:, 1:], torch.full_like(first[:, :1], width)], 1)
    found = torch.cat([values, torch.zeros_like(values[:, :1])], 1).gather(1, after)
    has_next = mask & (after < width)
    if turn is not None:
        has_next &= torch.cat([turn, torch.full_like(turn[:, :1], -1)], 1).gather(1, after) == turn
    return torch.where(has_next, found, torch.zeros_like(found))


def is_last_token(mask: Tensor) -> Tensor:
    """Whether each token is the last of the mask in its row, [B, T] bool."""
    return mask & (next_token_values(mask.float(), mask) == 0)
