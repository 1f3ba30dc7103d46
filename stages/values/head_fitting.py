"""Fits the head of a value model to the states of its frozen backbone.

With the backbone fixed, the head's loss is convex (squared error, or cross-entropy of a linear softmax), so it is solved to its
minimum by L-BFGS instead of being approached by steps: min_W sum_i w_i loss(W x_i, y_i) / sum_i w_i + l2 |W|^2, with states x_i
scaled to mean 0 and variance 1. Trees are of few tasks, whose states are alike, so the weight l2 decides; it is the one whose
predictions are closest to the targets of other tasks, by cross-validation over tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.seeding import permutation
from stages.values.contract import ValueHead
from stages.values.fitting import FitReport

L2 = (0.003, 0.03, 0.3)
"""What cross-validation chooses from."""
FOLDS = 3
ITERATIONS = 60


@dataclass(frozen=True)
class States:
    """`x` [N, D] float32: the backbone's states; `targets` and `weights` [N]; `tasks`: of each row."""

    x: Tensor
    targets: Tensor
    weights: Tensor
    tasks: Sequence[str]

    def rows(self, chosen: Tensor) -> States:
        """Those of the [N] bool."""
        tasks = [task for task, keep in zip(self.tasks, chosen.tolist(), strict=True) if keep]
        return States(self.x[chosen], self.targets[chosen], self.weights[chosen], tasks)


@dataclass(frozen=True)
class Linear:
    """logits = x @ weight + bias: [D, outputs], [outputs]."""

    weight: Tensor
    bias: Tensor
    iterations: int
    loss: float
    """Without the penalty."""

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def standardised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States [N, D] scaled to mean 0 and variance 1, their means and what they were multiplied by."""
    mean = x.mean(0)
    scale = 1 / x.std(0, correction=0).clamp(min=1e-6)
    return (x - mean) * scale, mean, scale


def folds_of(states: States, seed: int) -> Iterator[tuple[States, States]]:
    """The rows inside and outside of each of FOLDS folds over tasks; none with fewer than two tasks."""
    tasks = permutation(sorted(set(states.tasks)), seed, "value_folds")
    folds = min(FOLDS, len(tasks)) if len(tasks) > 1 else 0
    fold_of = {task: place % folds for place, task in enumerate(tasks)} if folds else {}
    fold = torch.tensor([fold_of.get(task, 0) for task in states.tasks], device=states.x.device)
    for number in range(folds):
        yield states.rows(fold != number), states.rows(fold == number)


def solve(head: ValueHead, states: States, start: Tensor, l2: float) -> Linear:
    """The minimum, from zero weights and the bias `start` [outputs] on."""
    (x, mean, scale), shares = standardised(states.x), states.weights / states.weights.sum()
    weight = torch.zeros(x.shape[1], len(start), device=x.device, requires_grad=True)
    bias = start.clone().requires_grad_(True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")
    loss = 0.0

    def penalised() -> Tensor:
        nonlocal loss
        solver.zero_grad()
        plain = (shares * head.loss(x @ weight + bias, states.targets)).sum()
        loss = float(plain.detach())
        total = plain + l2 * weight.square().sum()
        total.backward()
        return total

    solver.step(penalised)
    with torch.no_grad():
        unscaled = weight * scale[:, None]
        return Linear(unscaled, bias - mean @ unscaled, int(solver.state[weight]["n_iter"]), loss)


def choose_l2(head: ValueHead, states: States, start: Tensor, seed: int) -> float:
    """Of L2, the value whose predictions have the smallest weighted squared error on the tasks that a fold leaves out; with fewer
    than two tasks, the largest."""
    errors = dict.fromkeys(L2, 0.0)
    for inside, outside in folds_of(states, seed):
        for l2 in L2:
            predicted = head.decode(solve(head, inside, start, l2)(outside.x))
            errors[l2] += float((outside.weights * (predicted - outside.targets).square()).sum())
    return min(L2, key=lambda l2: (errors[l2], -l2))


def fit_head(output: torch.nn.Linear, head: ValueHead, states: States, l2: float | None, seed: int) -> FitReport:
    """Fit `output`, whose bias predicts the best constant, in place; l2 None: choose it."""
    start = output.bias.detach().float()
    chosen = choose_l2(head, states, start, seed) if l2 is None else l2
    with torch.no_grad():
        first = float(
            (states.weights * head.loss(start.expand(len(states.tasks), -1), states.targets)).sum() / states.weights.sum()
        )
    found = solve(head, states, start, chosen)
    with torch.no_grad():
        output.weight.copy_(found.weight.T)
        output.bias.copy_(found.bias)
    return FitReport(found.iterations, 0, [first, found.loss], l2=chosen)
