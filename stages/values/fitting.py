"""Fits a value model to stored examples: batches of about equal size in tokens, AdamW, a learning rate that rises and falls.

What every model of this folder is fitted with; what an example is and what its loss is, its own module says. An example fills
`rows` rows of `width` tokens: together with others the widest decides, and the rest is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from stages.seeding import permutation
from stages.values.settings import Fitting


class Example(Protocol):
    @property
    def task_id(self) -> str: ...

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...


E = TypeVar("E", bound=Example)


@dataclass
class FitReport:
    """`history`: training loss per optimiser step."""

    steps: int = 0
    tokens: int = 0
    history: list[float] = field(default_factory=list)
    clamped: float = 0.0
    """Share of the targets that lie outside the head's support."""


@dataclass(frozen=True)
class TaskSplit:
    """Which tasks are held out: one answer for all models that annotate fits, since one may start from another."""

    known: frozenset[str]
    """The tasks that the split was drawn from."""
    held_out: frozenset[str]
    valid_share: float
    seed: int

    @classmethod
    def of(cls, task_ids: Iterable[str], valid_share: float, seed: int) -> TaskSplit:
        """`valid_share` of the tasks held out, at least one. Raises ValueError for fewer than two tasks."""
        tasks = sorted(set(task_ids))
        if len(tasks) < 2:
            raise ValueError(f"a value model needs examples of at least 2 tasks, got {len(tasks)}; raise annotate.tasks")
        count = min(max(1, round(valid_share * len(tasks))), len(tasks) - 1)
        return cls(frozenset(tasks), frozenset(permutation(tasks, seed, "value_split")[:count]), valid_share, seed)

    def with_tasks(self, task_ids: Iterable[str]) -> TaskSplit:
        """The same split with `valid_share` of those tasks held out too that it does not know."""
        new = sorted(set(task_ids) - self.known)
        more = permutation(new, self.seed, "value_split")[: round(self.valid_share * len(new))]
        return TaskSplit(self.known.union(new), self.held_out.union(more), self.valid_share, self.seed)

    def parts(self, examples: Sequence[E]) -> tuple[list[E], list[E]]:
        """Training and held-out examples; tasks are held out whole."""
        held_out = [one for one in examples if one.task_id in self.held_out]
        return [one for one in examples if one.task_id not in self.held_out], held_out


def within(examples: Sequence[E], budget: int) -> list[list[E]]:
    """Examples cut into runs of at most `budget` padded tokens (one example at least)."""
    runs: list[list[E]] = []
    widest = rows = 0
    for example in examples:
        widest, rows = max(widest, example.width), rows + example.rows
        if runs and widest * rows <= budget:
            runs[-1].append(example)
        else:
            runs.append([example])
            widest, rows = example.width, example.rows
    return runs


def epoch_batches(examples: Sequence[E], batch_tokens: int, *key: object) -> list[list[E]]:
    """One epoch's optimiser batches of about `batch_tokens` padded tokens: shuffled, bucketed by length, shuffled again."""
    by_length = sorted(permutation(examples, *key, "order"), key=lambda example: example.width)
    return permutation(within(by_length, batch_tokens), *key, "batches")


def fit(
    module: nn.Module,
    examples: Sequence[E],
    loss: Callable[[Sequence[E]], Tensor],
    weight: Callable[[E], float],
    params: Fitting,
    micro_tokens: int,
    *key: object,
    on_step: Callable[[int, int, float], None] | None = None,
) -> FitReport:
    """Train `module` in place. Raises ValueError without examples.

    loss: of a run of examples, summed and weighted; a batch's loss is the sum over its examples divided by their summed `weight`.
    `micro_tokens` splits a batch in memory and changes nothing else; `key` orders the examples; `on_step` is told the step, its
    tokens and loss. The learning rate rises over the first tenth of the steps, then falls linearly. Fractions of an epoch are its
    first batches.
    """
    if not examples:
        raise ValueError("there is nothing to fit to")
    whole, part = divmod(params.epochs, 1)
    batches: list[list[E]] = []
    for epoch in range(int(whole) + (part > 0)):
        order = epoch_batches(examples, params.batch_tokens, *key, epoch)
        batches += order if epoch < whole else order[: max(1, round(part * len(order)))]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=params.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    report, warm = FitReport(), max(1, len(batches) // 10)
    for step, batch in enumerate(batches):
        rate = min((step + 1) / warm, (len(batches) - step) / max(1, len(batches) - warm), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = params.learning_rate * rate
        total, summed = sum(weight(example) for example in batch), 0.0
        for run in within(batch, micro_tokens):
            share = loss(run) / total
            share.backward()
            summed += share.item()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report.steps += 1
        tokens = sum(example.rows * example.width for example in batch)
        report.tokens += tokens
        report.history.append(summed)
        if on_step:
            on_step(step, tokens, summed)
    return report
