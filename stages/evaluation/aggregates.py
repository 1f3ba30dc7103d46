"""Statistics over runs as in rliable (Agarwal et al., "Deep RL at the edge of the statistical precipice", arXiv 2108.13264):
interquartile mean, stratified bootstrap, probability of improvement. Scores are [R runs, T tasks]. The package rliable would
bring arch, seaborn and absl into every installation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.stats when it is first used: most commands of the stages never do

from stages.evaluation.statistics import StatisticsError
from stages.seeding import key64


@dataclass(frozen=True)
class Bounded:
    """A statistic with its percentile bootstrap interval."""

    value: float
    low: float
    high: float


def _scores(scores: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 2 or 0 in array.shape or not np.isfinite(array).all():
        raise StatisticsError(f"scores must be finite, [runs, tasks], with at least one of each, not {array.shape}")
    return array


def iqm(scores: np.ndarray) -> float:
    """Interquartile mean: the mean of all R * T scores without the lowest and the highest quarter (each rounded down)."""
    return float(scipy.stats.trim_mean(_scores(scores), proportiontocut=0.25, axis=None))


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """Mean over tasks of P(a run of x > a run of y) + P(they are equal) / 2 (Mann-Whitney U over the number of pairs).

    x: [R, T], y: [S, T]. Raises StatisticsError if they differ in tasks.
    """
    first, second = _scores(x), _scores(y)
    if first.shape[1] != second.shape[1]:
        raise StatisticsError(f"x has {first.shape[1]} tasks and y {second.shape[1]}; compare settings on the same tasks")
    pairs = first[:, None, :] - second[None, :, :]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def stratified_bootstrap(
    statistic: Callable[..., float],
    *scores: np.ndarray,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Bounded:
    """`statistic` of `scores` ([R, T] each) with its percentile interval; runs are resampled separately for every task and
    array."""
    arrays = [_scores(one) for one in scores]
    rng = np.random.default_rng(key64("stratified-bootstrap", seed))
    drawn = np.empty(resamples)
    for index in range(resamples):
        resampled = []
        for array in arrays:
            runs = rng.integers(array.shape[0], size=array.shape)
            resampled.append(np.take_along_axis(array, runs, axis=0))
        drawn[index] = statistic(*resampled)
    low, high = np.quantile(drawn, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Bounded(float(statistic(*arrays)), float(low), float(high))
