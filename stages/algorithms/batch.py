"""The batch that all RL methods work on, and helpers for its tensors. Light to import.

Order: reward shaping -> group resampling -> advantage (level, mean, std) -> step credit -> policy loss -> aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ENDED, CUT, INVALID = -2, -3, -2
"""Values in `StepKeys.states` (ENDED, CUT) and `actions` (INVALID) that are no key of the environment."""


def _is_tensor(value: Any) -> bool:
    from torch import Tensor

    return isinstance(value, Tensor)


@dataclass(frozen=True)
class Extra:
    """Tensors that one part or method adds to a batch: a subclass is a frozen dataclass, found in `TrajectoryBatch.extra` under
    its type. Tensors have first dimension B; those that PER_TOKEN names have a token dimension after it."""

    PER_TOKEN: ClassVar[tuple[str, ...]] = ()

    def rows(self, index: Tensor) -> Self:
        """The rows in `index` ([b] int64)."""
        return replace(self, **{name: value[index] for name, value in vars(self).items() if _is_tensor(value)})

    def cut(self, width: int, device: torch.device | str) -> Self:
        """The first `width` tokens of each row, on `device`."""
        tensors = {name: value for name, value in vars(self).items() if _is_tensor(value)}
        moved = {name: (value[:, :width] if name in self.PER_TOKEN else value).to(device) for name, value in tensors.items()}
        return replace(self, **moved)


AnyExtra = TypeVar("AnyExtra", bound=Extra)


@dataclass(frozen=True)
class TrajectoryBatch(Extra):
    """B episodes of at most T tokens (padded on the right) and U turns. All of it is known before the update; nothing in it has a
    gradient."""

    PER_TOKEN = (
        *("token_ids", "mask", "turn", "external", "logprobs_old", "logprobs_drawn", "logprobs_ref"),
        *("token_rewards", "values", "advantages", "returns"),
    )

    token_ids: Tensor
    """[B, T] int64."""
    lengths: Tensor
    """[B] int64: real tokens per row."""
    mask: Tensor
    """[B, T] bool: the tokens that are trained on: the policy's, and those of external episodes."""
    turn: Tensor
    """[B, T] int64: turn index of a token, -1 for prompt and padding."""
    logprobs_old: Tensor
    """[B, T] float32: log-probabilities before the step's first update (0 off the mask), under the policy that drew the tokens;
    of external tokens, whose behaviour policy is unknown, under the policy that is trained."""
    group: Tensor
    """[B] int64: index of the episode's group."""
    rewards: Tensor
    """[B] float32: returns after shaping (before any KL penalty)."""
    turn_rewards: Tensor
    """[B, U] float32: reward of each turn, 0 past the end; they sum to `rewards`."""
    turns: Tensor
    """[B] int64: number of turns."""
    truncated: Tensor
    """[B] bool: cut by the turn limit or for lack of tokens."""
    task_ids: tuple[str, ...] = ()
    """[B]: the episodes' tasks."""
    logprobs_drawn: Tensor | None = None
    """[B, T] float32: log-probabilities as the engine drew the tokens, where the training pass recomputed `logprobs_old`."""
    external: Tensor | None = None
    """[B, T] bool: tokens of the mask that the policy did not write (demonstrations). None: there are none."""
    overlong: Tensor | None = None
    """[B] bool: ran out of tokens."""
    success: Tensor | None = None
    """[B] bool: the environment's return reached 1."""
    accepted: Tensor | None = None
    """[B, U] bool: the environment understood the turn's action; True past the end."""
    tool_calls: Tensor | None = None
    """[B] float32: sum of the turns' costs."""
    tools: Tensor | None = None
    """[B] int64: number of different tools called (first words of actions with a cost)."""
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] float32 each: the environment's reward terms, and the stages of progressive shaping."""
    weight: Tensor | None = None
    """[B] float32, set by group resampling: the row's weight in losses, denominators and statistics over the batch. None: 1."""
    token_rewards: Tensor | None = None
    """[B, T] float32: rewards per policy token beside `turn_rewards` (the KL penalty), 0 off the mask."""
    logprobs_ref: Tensor | None = None
    """[B, T] float32 under the frozen reference, where a KL term is on."""
    values: Tensor | None = None
    """[B, T] float32: the critic's value of the state before each token, where the method has a critic of tokens."""
    advantages: Tensor | None = None
    """[B, T] float32, set by the advantage parts; 0 off the mask."""
    returns: Tensor | None = None
    """[B, T] float32: targets of the critic of tokens, where there is one."""
    extra: Mapping[type[Extra], Extra] = field(default_factory=dict)
    """What single parts or methods need, by type; see `get` and `with_extra`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the whole batch for the history, one column each."""

    def with_(self, **changes: Any) -> TrajectoryBatch:
        """The batch with some fields replaced."""
        return replace(self, **changes)

    def with_metrics(self, **metrics: float) -> TrajectoryBatch:
        """The batch with further `metrics`."""
        return replace(self, metrics={**self.metrics, **metrics})

    def with_extra(self, *extra: Extra) -> TrajectoryBatch:
        """The batch with these records in `extra`."""
        return replace(self, extra={**self.extra, **{type(one): one for one in extra}})

    def get(self, kind: type[AnyExtra]) -> AnyExtra | None:
        """The record of type `kind` in `extra`, if there is one."""
        return cast("AnyExtra | None", self.extra.get(kind))

    def rows(self, index: Tensor) -> TrajectoryBatch:
        """The rows in `index` ([b] int64), all fields; `group` keeps its numbers."""
        picked = super().rows(index)
        task_ids = tuple(self.task_ids[row] for row in index.tolist()) if self.task_ids else ()
        extra = {kind: one.rows(index) for kind, one in self.extra.items()}
        return picked.with_(task_ids=task_ids, terms={name: value[index] for name, value in self.terms.items()}, extra=extra)

    def cut(self, width: int, device: torch.device | str) -> TrajectoryBatch:
        moved = super().cut(width, device)
        extra = {kind: one.cut(width, device) for kind, one in self.extra.items()}
        return moved.with_(terms={name: value.to(device) for name, value in self.terms.items()}, extra=extra)

    @property
    def weights(self) -> Tensor:
        """`weight`, [B] float32, 1 where it is None."""
        import torch

        return torch.ones(self.size, device=self.mask.device) if self.weight is None else self.weight

    @property
    def policy_mask(self) -> Tensor:
        """Tokens of the mask that the policy wrote itself, [B, T] bool."""
        return self.mask if self.external is None else self.mask & ~self.external

    @property
    def real_turns(self) -> Tensor:
        """Which turns an episode has, [B, U] bool."""
        import torch

        return torch.arange(self.turn_rewards.shape[1])[None, :] < self.turns[:, None]

    @property
    def size(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True)
class StepKeys(Extra):
    """What the turns of a batch have in common, as numbers; -1 past an episode's end."""

    states: Tensor
    """[B, U + 1] int64: state before each turn and after the last, equal where the environment's state keys are. After the last
    turn: ENDED, or CUT for a truncated episode."""
    actions: Tensor
    """[B, U] int64: each turn's action, equal where action keys are; INVALID where the environment did not understand it."""
    draws: Tensor
    """[B, U] int64: turns that branches inherited have the number of the one draw that they stem from."""
    state_names: tuple[str, ...]
    """State keys by their numbers in `states`."""


@dataclass(frozen=True)
class Observed(Extra):
    """Which tokens of a batch are observations."""

    PER_TOKEN = ("mask",)

    mask: Tensor
    """[B, T] bool: tokens that the environment wrote after a turn, with those of the chat template around them."""


@dataclass(frozen=True)
class TurnWords(Extra):
    """How long the batch's turns are as text."""

    count: Tensor
    """[B, U] float32: words of each turn's action."""


@dataclass(frozen=True)
class Costs(Extra):
    """Of the batch's episodes, where their tools have prices."""

    spent: Tensor
    """[B] float32: price times tokens of all calls, in millionths of the currency of the prices."""


@dataclass(frozen=True)
class Written(Extra):
    """Who wrote each token of a batch; only of one with tokens that a decoder forced, self-written evidence or guidance."""

    PER_TOKEN = ("owner",)

    owner: Tensor
    """[B, T] int64: `stages.records.episode.Owner`."""


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
    """Zero mean and unit standard deviation over `mask` [B, T], weighted by `weight`: [B] of rows, [B, T] of tokens; 0
    elsewhere."""
    counts = mask if weight is None else mask * (weight if weight.dim() == 2 else weight[:, None])
    mean = masked_mean(values, counts)
    variance = masked_mean((values - mean) ** 2, counts)
    return ((values - mean) / (variance + eps).sqrt()).where(mask, 0.0)


def next_token_values(values: Tensor, mask: Tensor, turn: Tensor | None = None) -> Tensor:
    """`values` [b, T] at the next token of the row in `mask` [b, T], for each token of the mask; 0 after the last one and off the
    mask. With turn [b, T]: also 0 after the last token of each turn."""
    import torch

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


def turn_sums(values: Tensor, turn: Tensor, count: int) -> Tensor:
    """Sum of values [B, T] over the tokens of each turn, [B, count], from turn indices [B, T]; turn -1 is ignored."""
    import torch

    sums = values.new_zeros(values.shape[0], count)
    return sums.scatter_add(1, turn.clamp(min=0), torch.where(turn >= 0, values, torch.zeros_like(values)))


def turn_tokens(batch: TrajectoryBatch) -> Tensor:
    """Masked tokens of each turn, [B, U] float32."""
    return turn_sums(batch.mask.float(), batch.turn, batch.turn_rewards.shape[1])


def turn_means(batch: TrajectoryBatch) -> Tensor:
    """[B, T]: one over the masked tokens of a token's turn, 0 off the mask, so that each turn counts once."""
    counts = turn_tokens(batch).gather(1, batch.turn.clamp(min=0))
    return batch.mask / counts.clamp(min=1)


def is_last_token(mask: Tensor) -> Tensor:
    """Whether each token is the last of the mask in its row, [B, T] bool."""
    return mask & (next_token_values(mask.float(), mask) == 0)


@dataclass(frozen=True)
class TurnTerms(Extra):
    """The environment's reward terms of each turn; over an episode's turns they sum to `TrajectoryBatch.terms`."""

    names: tuple[str, ...]
    """K."""
    values: Tensor
    """[B, U, K] float32, 0 where a turn has no such term and past an episode's end."""

    def of(self, name: str) -> Tensor:
        """A term [B, U]. Raises KeyError if no turn has it."""
        if name not in self.names:
            raise KeyError(name)
        return self.values[:, :, self.names.index(name)]
