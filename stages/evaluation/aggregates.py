"""Statistics over runs: the paired difference of two settings over seeds, and those of rliable (Agarwal et al., "Deep RL at the
edge of the statistical precipice", arXiv 2108.13264): interquartile mean, stratified bootstrap, probability of improvement.
Scores are [R runs, T tasks].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy  # loads scipy.stats when it is first used: most commands of the stages never do

from stages.evaluation.statistics import StatisticsError
from stages.seeding import key64

ClaimVerdict = Literal["reproduced", "not reproduced", "undecided"]


@dataclass(frozen=True)
class Bounded:
    """A statistic with its percentile bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """Mean of a - b over `n` seeds with Student's t interval of paired samples."""

    difference: float
    low: float
    high: float
    n: int


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """`a[i]` and `b[i]` are of the same seed. Student's t, since a bootstrap over five seeds is far too narrow.

    Equal differences give an interval of width 0. Raises StatisticsError for fewer than two seeds, unequal numbers of seeds, or
    values that are not finite.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise StatisticsError(
            f"a paired difference needs the same seeds on both sides, at least two: {first.size} and {second.size}"
        )
    differences = first - second
    if not np.isfinite(differences).all():
        raise StatisticsError("a paired difference needs finite values")
    mean, n = float(differences.mean()), len(differences)
    half = float(scipy.stats.t.ppf(0.5 + confidence / 2, n - 1) * differences.std(ddof=1) / math.sqrt(n))
    return PairedDifference(mean, mean - half, mean + half, n)


def claim_verdict(found: PairedDifference, threshold: float) -> ClaimVerdict:
    """`reproduced`: the interval is above 0 and the difference at least `threshold`; for a negative threshold (non-inferiority)
    the interval is above the threshold. `not reproduced`: the interval is below `threshold` (at most 0 for a threshold of 0).
    `undecided`: more seeds or episodes are needed."""
    if found.low > min(0.0, threshold) and found.difference >= threshold:
        return "reproduced"
    if found.high < threshold or (threshold == 0.0 and found.high <= 0.0):
        return "not reproduced"
    return "undecided"


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
