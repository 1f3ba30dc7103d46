"""The difference of two arms with its interval, over seeds and clusters of tasks.

Values form a crossed table: the run of every seed plays every task of the panel. Seeds and clusters are both samples, so the
variance of the mean difference over S seeds and C clusters is that of the crossed bootstrap, which draws seeds and clusters with
replacement (Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 1, 2007). A mean's needs no draws: with

    V_s = variance of the S row means / S,  V_c = variance of the C column means / C,  V_sc = residual variance / (S C),

the bootstrap's tends to V_s + V_c + V_sc. Row and column means each contain the residual already, so the unbiased variance is
V_s + V_c - V_sc, and at least V_s and V_c, as no component is negative. Student's t with Satterthwaite's degrees of freedom turns
it into an interval: over eight seeds, percentiles of a bootstrap are far too narrow.

Arms whose runs have the same distribution have symmetric paired differences, for which t holds its level with bistable and skewed
runs, too (tests/claims/test_sequential.py). No interval contains what no run showed: a failure of one run in five is absent from
eight runs with a probability of 17 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy  # loads scipy.special when it is first used

from stages.evaluation.statistics import StatisticsError

ROUNDING = 1e-6
"""Standard errors up to this share of the largest value are rounding errors of equal differences: values are kept with six
digits, or as float32."""


@dataclass(frozen=True)
class Sample:
    """One arm's metric.

    values: [S seeds], or [S seeds, C clusters] with the mean over each cluster's tasks. sizes: number of tasks per cluster [C].
    seedless: the arm does not train, so its only row (S = 1) is its value with every seed.
    """

    values: np.ndarray
    sizes: np.ndarray | None = None
    seedless: bool = False

    def __post_init__(self) -> None:
        shape = self.values.shape
        wanted = 1 if self.sizes is None else 2
        if len(shape) != wanted or 0 in shape or not np.isfinite(self.values).all():
            raise StatisticsError(f"values must be finite, one per seed (and cluster, with sizes), not of shape {shape}")
        if self.sizes is not None and (self.sizes.shape != shape[1:] or not (self.sizes > 0).all()):
            raise StatisticsError(f"each of the {shape[1]} clusters needs a positive number of tasks, not {self.sizes}")
        if self.seedless and shape[0] != 1:
            raise StatisticsError(f"an arm without seeds has one row of values, not {shape[0]}")

    @classmethod
    def of_tasks(cls, values: np.ndarray, clusters: Sequence[str], seedless: bool = False) -> Sample:
        """values: [S, T] means over each task's attempts; clusters: [T] the cluster of each task."""
        names, index, sizes = np.unique(np.asarray(clusters, dtype=str), return_inverse=True, return_counts=True)
        if values.shape[1:] != index.shape:
            raise StatisticsError(f"values of shape {values.shape} were given for {len(index)} tasks; each needs its cluster")
        means = (np.asarray(values, dtype=np.float64) @ np.eye(len(names))[index]) / sizes
        return cls(means, sizes, seedless)

    @property
    def seeds(self) -> int:
        """Number of seeds, 0 for an arm without."""
        return 0 if self.seedless else len(self.values)

    def first(self, seeds: int) -> Sample:
        """The sample of the first seeds alone."""
        return self if self.seedless else replace(self, values=self.values[:seeds])


@dataclass(frozen=True)
class Estimate:
    """Mean difference with its interval.

    low, high: at level 1 - alpha. margin_low, margin_high: at level 1 - 2 alpha, for two one-sided tests at alpha (TOST). p:
    two-sided, at most alpha exactly if low..high excludes 0. seeds: 0 if neither arm has any. clusters: 0 without rows per task,
    when the interval is conditional on the panel.
    """

    difference: float
    low: float
    high: float
    margin_low: float
    margin_high: float
    p: float
    seeds: int
    clusters: int

    @property
    def degenerate(self) -> bool:
        """Whether all differences were equal, so that nothing says how far they scatter: the interval has width 0, p is 1, and no
        verdict follows."""
        return self.low == self.high


def _differences(a: Sample, b: Sample) -> tuple[np.ndarray, np.ndarray]:
    """(a - b [S, C], weights of the clusters [C] that sum to 1); C = 1 without rows per task."""
    sizes, others = ([] if sample.sizes is None else sample.sizes.tolist() for sample in (a, b))
    if sizes != others:
        raise StatisticsError("both arms need the same clusters of tasks, or neither any; evaluate both on one panel")
    if a.seeds and b.seeds and a.seeds != b.seeds:
        raise StatisticsError(f"runs are paired by seed, but one arm has {a.seeds} seeds and the other {b.seeds}")
    differences = np.asarray(a.values - b.values, dtype=np.float64)
    if a.sizes is None:
        return differences[:, None], np.ones(1)
    return differences, a.sizes / a.sizes.sum()


def _standard_error(table: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """(standard error of the weighted mean of the table [S, C], its degrees of freedom). S = 1: arms without seeds."""
    seeds, clusters = table.shape
    rows, columns = table @ weights, table.mean(axis=0)
    mean = rows.mean()
    # A weighted mean's variance is the sum of its terms' squares; C / (C - 1) makes it unbiased where the weights are equal.
    by_seed = ((rows - mean) ** 2).sum() / (seeds * (seeds - 1)) if seeds > 1 else 0.0
    if clusters == 1:
        return float(np.sqrt(by_seed)), seeds - 1
    squares = weights**2 * clusters / (clusters - 1)
    by_cluster = float(squares @ (columns - mean) ** 2)
    if seeds == 1:
        return float(np.sqrt(by_cluster)), clusters - 1
    residuals = table - rows[:, None] - columns + mean
    residual = float(squares @ (residuals**2).sum(axis=0)) / (seeds * (seeds - 1))
    variance = max(by_seed, by_cluster, by_seed + by_cluster - residual)
    if variance == 0.0:
        return 0.0, seeds - 1
    terms = by_seed**2 / (seeds - 1) + by_cluster**2 / (clusters - 1) + residual**2 / ((seeds - 1) * (clusters - 1))
    return float(np.sqrt(variance)), max(min(seeds, clusters) - 1, variance**2 / terms)


def compare(a: Sample, b: Sample, alpha: float) -> Estimate:
    """Mean of a - b, paired by seed and task, weighted by the clusters' sizes.

    Raises StatisticsError if the arms differ in seeds or clusters, or if there are neither two seeds nor two clusters.
    """
    table, weights = _differences(a, b)
    seeds, clusters = max(a.seeds, b.seeds), 0 if a.sizes is None else len(a.sizes)
    if (seeds or clusters) < 2:
        raise StatisticsError(f"an interval needs two seeds, or two clusters if nothing trains: {seeds} and {clusters}")
    difference = float((table @ weights).mean())
    error, freedom = _standard_error(table, weights)
    if error <= ROUNDING * max(float(np.abs(sample.values).max()) for sample in (a, b)):
        return Estimate(difference, difference, difference, difference, difference, 1.0, seeds, clusters)
    half, margin = (error * float(scipy.special.stdtrit(freedom, 1.0 - level)) for level in (alpha / 2, alpha))
    p = 2.0 * float(scipy.special.stdtr(freedom, -abs(difference) / error))
    return Estimate(
        difference, difference - half, difference + half, difference - margin, difference + margin, p, seeds, clusters
    )
