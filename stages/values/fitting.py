"""Fits value models to stored examples: batches of about equal size in tokens, AdamW, linear warm-up and decay.

Each model's module defines its examples and their loss. An example takes `rows` rows of `width` tokens, padded to the widest of
its batch.
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
    """Fraction of targets outside the head's support."""
    l2: float | None = None
    """Weight of the squared weights, of a linear head alone (stages/values/head_fitting.py)."""
    epochs: int | None = None
    """Of a head with a hidden layer (stages/values/hidden_head.py)."""


@dataclass(frozen=True)
class TaskSplit:
    """The held-out tasks, shared by all models that annotate fits, since one may start from another."""

    known: frozenset[str]
    """All tasks of the split."""
    held_out: frozenset[str]
    valid_share: float
    seed: int

    @classmethod
    def of(cls, task_ids: Iterable[str], valid_share: float, seed: int) -> TaskSplit:
        """Hold out `valid_share` of the tasks, at least one. Raises ValueError for fewer than two tasks."""
        tasks = sorted(set(task_ids))
        if len(tasks) < 2:
            raise ValueError(f"a value model needs examples of at least 2 tasks, got {len(tasks)}; raise annotate.tasks")
        count = min(max(1, round(valid_share * len(tasks))), len(tasks) - 1)
        return cls(frozenset(tasks), frozenset(permutation(tasks, seed, "value_split")[:count]), valid_share, seed)

    def with_tasks(self, task_ids: Iterable[str]) -> TaskSplit:
        """The same split, also holding out `valid_share` of the tasks that are not in it."""
        new = sorted(set(task_ids) - self.known)
        more = permutation(new, self.seed, "value_split")[: round(self.valid_share * len(new))]
        return TaskSplit(self.known.union(new), self.held_out.union(more), self.valid_share, self.seed)

    def parts(self, examples: Sequence[E]) -> tuple[list[E], list[E]]:
        """Training and held-out examples."""
        held_out = [one for one in examples if one.task_id in self.held_out]
        return [one for one in examples if one.task_id not in self.held_out], held_out


def token_batches(examples: Sequence[E], budget: int) -> list[list[E]]:
    """Consecutive examples in batches of at most `budget` padded tokens, or a single example."""
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
    return permutation(token_batches(by_length, batch_tokens), *key, "batches")


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

    loss: weighted sum over some examples; a batch's loss is this sum over its summed `weight`. `micro_tokens` splits a batch
    to save memory, without effect on the result; `key` orders the examples; `on_step` gets the step, its tokens and loss. The
    learning rate rises over the first tenth of the steps, then falls linearly. A fraction of an epoch is its first batches.
    """
    if not examples:
        raise ValueError("there are no examples to fit to")
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
        for micro in token_batches(batch, micro_tokens):
            share = loss(micro) / total
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
