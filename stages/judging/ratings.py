"""Strengths from pairwise results: Bradley-Terry and Thurstone (case V), fitted by Newton's method with a ridge.

    P(i beats j) = F(t_i - t_j),  F the logistic function (Bradley-Terry) or the normal distribution function (Thurstone)
    L(t) = -sum_ij w_ij log F(t_i - t_j) + ridge / 2 * sum_i t_i^2

w_ij counts wins of i over j, a tie as half a win for both. L is convex; its inverse Hessian is the covariance of the strengths
(Laplace). With a ridge the strengths have mean 0; without one they are centred, and their covariance is that of differences from
the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.special import expit, log_expit, log_ndtr

Array = NDArray[np.float64]
Model = Literal["bradley_terry", "thurstone"]
STEPS = 100
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Ratings:
    """`strengths` [N] and their `covariance` [N, N]."""

    strengths: Array
    covariance: Array

    @property
    def errors(self) -> Array:
        """Standard errors [N]."""
        return np.sqrt(np.diagonal(self.covariance).clip(min=0.0))


def win_counts(count: int, results: Iterable[tuple[int, int, float]]) -> Array:
    """w [N, N] of results (i, j, score of i): 1 a win, 0 a loss, 0.5 a tie, anything between a share of wins."""
    wins = np.zeros((count, count))
    for first, second, score in results:
        wins[first, second] += score
        wins[second, first] += 1.0 - score
    return wins


def _logistic(gap: Array) -> tuple[Array, Array, Array]:
    p = expit(gap)
    return log_expit(gap), 1.0 - p, p * (1.0 - p)


def _normal(gap: Array) -> tuple[Array, Array, Array]:
    value = log_ndtr(gap)
    slope = np.exp(-0.5 * gap**2 - value) / np.sqrt(2 * np.pi)
    return value, slope, slope * (slope + gap)


LINKS: dict[Model, Callable[[Array], tuple[Array, Array, Array]]] = {"bradley_terry": _logistic, "thurstone": _normal}
"""log F, its derivative and minus its second derivative, of differences [N, N]."""


def fit(wins: Array, model: Model = "bradley_terry", ridge: float = 1e-6) -> Ratings:
    """Strengths of N players from wins [N, N] >= 0.

    Raises ValueError for a matrix that is not square or has negative entries, and without a ridge where no finite maximum exists
    (a player or a group of players never lost, or never played the others).
    """
    wins = np.asarray(wins, dtype=np.float64)
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1] or (wins < 0).any():
        raise ValueError(f"wins must be a square matrix of counts of at least 0, not of shape {wins.shape}")
    # A maximum exists if and only if no player, or group of players, never lost to the others (Ford 1957).
    if not ridge and connected_components(wins > 0, connection="strong")[0] > 1:
        raise ValueError(
            "these results have no best fit, since players never lost to, or never met, the others; set a ridge above 0"
        )
    strengths = np.zeros(len(wins))
    loss, gradient, hessian = _terms(strengths, wins, model, ridge)
    for _ in range(STEPS):
        if np.abs(gradient).max(initial=0.0) < TOLERANCE:
            break
        step = _solve(hessian, gradient, ridge)
        strengths, loss, gradient, hessian = _search(strengths, step, loss, wins, model, ridge)
    inverse = np.linalg.inv(hessian) if ridge else np.linalg.pinv(hessian)
    return Ratings(strengths, inverse.astype(np.float64))


def _terms(strengths: Array, wins: Array, model: Model, ridge: float) -> tuple[float, Array, Array]:
    """The loss, its gradient [N] and its Hessian [N, N]."""
    value, slope, curve = LINKS[model](strengths[:, None] - strengths[None, :])
    loss = -float((wins * value).sum()) + ridge / 2 * float((strengths**2).sum())
    pull = wins * slope
    gradient = pull.sum(0) - pull.sum(1) + ridge * strengths
    weight = wins * curve
    weight = weight + weight.T
    hessian = np.diag(weight.sum(1)) - weight + ridge * np.eye(len(strengths))
    return loss, gradient, hessian


def _solve(hessian: Array, gradient: Array, ridge: float) -> Array:
    step = np.linalg.solve(hessian, gradient) if ridge else np.linalg.pinv(hessian) @ gradient
    return step.astype(np.float64)


def _search(
    strengths: Array, step: Array, loss: float, wins: Array, model: Model, ridge: float
) -> tuple[Array, float, Array, Array]:
    """The longest of the steps 1, 1/2, 1/4, ... that does not raise the loss."""
    size = 1.0
    while True:
        tried = strengths - size * step
        found = _terms(tried, wins, model, ridge)
        if found[0] <= loss or size < 1e-8:
            return tried, *found
        size /= 2
