"""Fits a head with one hidden layer to the states of a value model's frozen backbone.

AdamW minimises the head's loss, weighted by rollouts, with dropout; the fitted head is the moving average of the weights. Trees
are of few tasks, which such a head soon knows by heart: it is trained for as many epochs as predict the targets of other tasks
best, by the cross-validation that chooses a linear head's penalty (stages/values/head_fitting.py). The layer and all its rates
are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.seeding import key64
from stages.values.contract import ValueHead
from stages.values.fitting import FitReport
from stages.values.head_fitting import States, folds_of, standardised

EPOCHS = (1, 2, 4, 8, 16, 32)
"""What cross-validation chooses from."""
ROWS = 256
"""States per update."""
LEARNING_RATE, WEIGHT_DECAY, DROPOUT, AVERAGE = 2e-3, 0.3, 0.5, 0.98
"""AVERAGE: share of the moving average that an update keeps."""


def make_hidden(width: int, hidden: int, outputs: int) -> nn.Sequential:
    """States [..., width] -> logits [..., outputs]: zero until it is fitted."""
    layers = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, outputs))
    for layer in (layers[0], layers[2]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return layers


class _Trained:
    """Weights while they are trained, on states with mean 0 and variance 1."""

    def __init__(self, width: int, hidden: int, start: Tensor, seed: int, *key: object) -> None:
        self.generator = torch.Generator().manual_seed(key64("hidden_head", seed, *key) >> 1)
        spread = (2 / width) ** 0.5
        first = spread * torch.randn(width, hidden, generator=self.generator)
        weights = [first, torch.zeros(hidden), torch.zeros(hidden, len(start)), start.cpu()]
        self.weights = [weight.to(start.device, copy=True).requires_grad_(True) for weight in weights]
        self.averages = [weight.detach().clone() for weight in self.weights]
        self.updates = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of the averages."""
        first, bias, second, last = self.averages
        return functional.gelu(x @ first + bias) @ second + last

    def _dropped(self, x: Tensor) -> Tensor:
        """Logits of the weights, with units dropped at random."""
        first, bias, second, last = self.weights
        inner = functional.gelu(x @ first + bias)
        kept = torch.rand(inner.shape, generator=self.generator) >= DROPOUT
        return (inner * kept.to(inner.device) / (1 - DROPOUT)) @ second + last

    @torch.no_grad()
    def _average(self) -> None:
        self.updates += 1
        kept = min(AVERAGE, self.updates / (self.updates + 9))  # at first the average of few updates
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.lerp_(weight, 1 - kept)

    def train(self, head: ValueHead, x: Tensor, states: States) -> Iterator[float]:
        """After each epoch, its mean loss."""
        solver = torch.optim.AdamW(self.weights, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        shares = states.weights / states.weights.mean()
        while True:
            order = torch.randperm(len(x), generator=self.generator)
            total = 0.0
            for low, high in pairwise([*range(0, len(x), ROWS), len(x)]):
                rows = order[low:high].to(x.device)
                loss = (shares[rows] * head.loss(self._dropped(x[rows]), states.targets[rows])).mean()
                solver.zero_grad()
                loss.backward()
                solver.step()
                self._average()
                total += float(loss.detach()) * len(rows)
            yield total / len(x)


def choose_epochs(head: ValueHead, states: States, hidden: int, start: Tensor, seed: int) -> int:
    """Of EPOCHS, the number whose predictions have the smallest weighted squared error on the tasks that a fold leaves out; with
    fewer than two tasks, the smallest."""
    errors = dict.fromkeys(EPOCHS, 0.0)
    for number, (inside, outside) in enumerate(folds_of(states, seed)):
        x, mean, scale = standardised(inside.x)
        trained = _Trained(x.shape[1], hidden, start, seed, "fold", number)
        for epoch, _ in zip(range(1, max(EPOCHS) + 1), trained.train(head, x, inside), strict=False):
            if epoch in errors:
                predicted = head.decode(trained((outside.x - mean) * scale))
                errors[epoch] += float((outside.weights * (predicted - outside.targets).square()).sum())
    return min(EPOCHS, key=lambda epochs: (errors[epochs], epochs))


def fit_hidden(output: nn.Sequential, head: ValueHead, states: States, seed: int) -> FitReport:
    """Fit `output` (`make_hidden`), whose last bias predicts the best constant, in place."""
    first, last = output[0], output[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    start = last.bias.detach().float()
    epochs = choose_epochs(head, states, first.out_features, start, seed)
    x, mean, scale = standardised(states.x)
    trained = _Trained(x.shape[1], first.out_features, start, seed, "all")
    history = [loss for _, loss in zip(range(epochs), trained.train(head, x, states), strict=False)]
    with torch.no_grad():
        weight, bias, *outer = trained.averages
        unscaled = weight * scale[:, None]
        for layer, found, offset in ((first, unscaled, bias - mean @ unscaled), (last, *outer)):
            layer.weight.copy_(found.T)
            layer.bias.copy_(offset)
    return FitReport(trained.updates, 0, history, epochs=epochs)
