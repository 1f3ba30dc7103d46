"""Predicts a design's score on a task family, with a standard deviation, from descriptions of both.

One row per (evaluated design, domain): features are the design's options and the domain's description, the target is the score
with its known standard error. A Gaussian process (a linear kernel for main effects, a Matérn kernel for interactions) or Bayesian
linear regression, by scikit-learn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np

from stages.designs.space import Design, Space, features
from stages.designs.tree import Node
from stages.records.task import Task

FEWEST = 4
"""Smallest number of designs to fit a model; below it, predictions are the mean and BROAD."""
BROAD = 0.25
BLOCK = 128
"""Designs per prediction batch."""
LEAST_STD = 1e-3
IDENTITY = 0.3
"""Weight of the one-hot domain feature beside descriptions of unit variance: a priori, domains are as similar as their
descriptions."""
GRID = ((0.03, 0.3, 3.0), (0.1, 1.0), (0.7, 1.5, 3.0))
"""Of the Gaussian process: amplitude of main effects, amplitude and length scale of interactions."""
MISFIT = 0.02
"""Unexplained share of the scores' variance."""

Description = Mapping[str, float]
"""Features of a domain's tasks; see `describe`."""


class ValueModel(Protocol):
    def fit(self, nodes: Sequence[Node]) -> None: ...

    def predict(self, designs: Sequence[Design]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each design's score, [N] each."""
        ...


def describe(tasks: Sequence[Task], max_turns: int) -> dict[str, float]:
    """Features of a task family: mean difficulty, mean number of words in prompts, turn limit."""
    words = [len(task.prompt.split()) for task in tasks]
    return {
        "difficulty": round(float(np.mean([task.difficulty for task in tasks])), 6),
        "prompt_words": round(float(np.mean(words)), 6),
        "max_turns": float(max_turns),
    }


def acquisition(mean: np.ndarray, std: np.ndarray, kappa: float, sign: int) -> np.ndarray:
    """sign * mean + kappa * std: +1 prefers promising designs, -1 poor ones, both uncertain ones."""
    return sign * mean + kappa * std


def _domain_features(domains: Mapping[str, Description]) -> dict[str, list[float]]:
    """Domain -> features: the description's numbers; with several domains, standardised over them, and a one-hot identity."""
    logs = np.array([[math.log1p(one[name]) for name in sorted(one)] for one in domains.values()])
    if len(domains) == 1:
        return dict(zip(domains, (logs / 4).tolist(), strict=True))
    spread = logs.std(axis=0)
    numbers = (logs - logs.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    which = IDENTITY * np.eye(len(domains))
    return dict(zip(domains, np.hstack([which, numbers]).tolist(), strict=True))


class FittedValueModel:
    """`ValueModel` of a space and the domains that it is searched for; `kind`: gp | ridge."""

    def __init__(self, space: Space, domains: Mapping[str, Description], kind: str) -> None:
        self.space, self.domains, self.kind = space, domains, kind
        self._tasks = _domain_features(domains)
        self._model: Any = None
        self._mean, self._scale = 0.5, BROAD

    def rows(self, designs: Sequence[Design], domains: Sequence[str]) -> np.ndarray:
        """Features [len(designs), F] of designs, each in its domain."""
        return np.array([self._row(design, domain) for design, domain in zip(designs, domains, strict=True)])

    def _row(self, design: Design, domain: str) -> list[float]:
        """Features of design and task and, with several domains, their products, so that the effect of an option may depend on
        the domain."""
        own, task = features(self.space, design), self._tasks[domain]
        together = [value * number for number in task for value in own] if len(self.domains) > 1 else []
        return [*own, *task, *together]

    def fit(self, nodes: Sequence[Node]) -> None:
        """Fit on (design, domain) pairs that were evaluated, without rejected designs, whose score 0 means nothing."""
        nodes = [node for node in nodes if not node.failed]
        pairs = [
            (node.design, domain, *node.by_domain[domain])
            for node in nodes
            for domain in self.domains
            if domain in node.by_domain
        ]
        y = np.array([score for _, _, score, _ in pairs])
        errors = np.array([error for _, _, _, error in pairs])
        self._mean, self._model = float(y.mean()) if pairs else 0.5, None
        if len(nodes) < FEWEST:
            return
        self._scale = max(float(y.std()), 0.05)
        x = self.rows([design for design, *_ in pairs], [domain for _, domain, *_ in pairs])
        self._model = _gaussian_process((errors / self._scale) ** 2) if self.kind == "gp" else _ridge()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of hyperparameters at their bounds and constant scores
            self._model.fit(x, (y - self._mean) / self._scale)

    def predict(self, designs: Sequence[Design], domains: Sequence[str] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the score averaged over `domains` (default: all), whose errors are correlated (gp) or
        assumed to be (ridge)."""
        if self._model is None:
            return np.full(len(designs), self._mean), np.full(len(designs), BROAD)
        names = list(domains or self.domains)
        parts = [self._block(designs[start : start + BLOCK], names) for start in range(0, len(designs), BLOCK)]
        mean, std = (np.concatenate(part) for part in zip(*parts, strict=True))
        # Rounded, so that designs with equal features tie, and the first in canonical order is taken.
        return np.round(self._mean + self._scale * mean, 9), np.round(np.maximum(self._scale * std, LEAST_STD), 9)

    def _block(self, designs: Sequence[Design], names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        count = len(designs)
        x = self.rows([design for design in designs for _ in names], names * count)
        if self.kind == "gp":
            mean, covariance = self._model.predict(x, return_cov=True)
            blocks = covariance.reshape(count, len(names), count, len(names))
            variance = np.array([blocks[i, :, i, :].mean() for i in range(count)])
        else:
            mean, std = self._model.predict(x, return_std=True)
            variance = (std.reshape(count, -1) ** 2).mean(axis=1)
        return mean.reshape(count, -1).mean(axis=1), np.sqrt(np.maximum(variance, 0.0))


def _gaussian_process(noise: np.ndarray) -> Any:
    """`noise` [rows]: known variance of each target. Hyperparameters are the point of GRID with the largest marginal
    likelihood: for so few rows as good as gradient ascent, and faster."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern, WhiteKernel

    alone = ConstantKernel(0.3) * DotProduct(1.0, "fixed")
    together = ConstantKernel(0.5) * Matern(1.5, nu=2.5)
    kernel = alone + together + WhiteKernel(MISFIT, "fixed")
    return GaussianProcessRegressor(kernel, alpha=np.maximum(noise, 1e-6), optimizer=_likeliest)


def _likeliest(objective: Callable[..., float], start: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, float]:
    """scikit-learn's optimiser interface: log of the GRID point that minimises `objective`, the negative log marginal
    likelihood."""
    found = [(float(objective(theta, eval_gradient=False)), theta) for theta in map(np.log, product(*GRID))]
    least = min(found, key=lambda one: one[0])
    return least[1], least[0]


def _ridge() -> Any:
    from sklearn.linear_model import BayesianRidge

    return BayesianRidge()
