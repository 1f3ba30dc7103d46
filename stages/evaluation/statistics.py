"""Confidence intervals: cluster bootstrap, pass@k, Wilson, and the paired comparison of two models on the same tasks.

Rows are attempts: `tasks[r]` is the task of `values[r]`. A task's value is the mean of its attempts; tasks are resampled with all
their attempts. `clusters` maps related tasks (one game, one set of pages) to a common name; then whole clusters are resampled.
Every random draw is keyed by the caller's seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import scipy  # loads scipy.stats when it is first used: most commands of the stages never do

from stages.seeding import key64

Verdict = Literal["better", "worse", "undecided"]


class StatisticsError(ValueError):
    """Samples for which a statistic is undefined."""


@dataclass(frozen=True)
class Interval:
    """`n` tasks in `clusters` clusters, `attempts` rows in all. `method`: how low and high were found."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int
    attempts: int
    method: Literal["bootstrap", "wilson"]


@dataclass(frozen=True)
class Comparison:
    """Model a against model b over `n` common tasks: mean of a - b with its interval, two-sided p, verdict on a."""

    difference: float
    low: float
    high: float
    p: float
    verdict: Verdict
    n: int
    clusters: int


def task_means(values: Sequence[float] | np.ndarray, tasks: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """(task names sorted, mean of each task's attempts [T] float64). Raises StatisticsError for no rows or bad values."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.shape != (len(tasks),):
        raise StatisticsError(f"{numbers.size} values were given for {len(tasks)} task names; each attempt needs both")
    if not len(tasks):
        raise StatisticsError("no attempts were given; evaluate at least two tasks")
    if not np.isfinite(numbers).all():
        raise StatisticsError(f"task {tasks[int(np.flatnonzero(~np.isfinite(numbers))[0])]} has a value that is not finite")
    names, index = np.unique(np.asarray(tasks, dtype=object).astype(str), return_inverse=True)
    sums = np.bincount(index, weights=numbers)
    return [str(name) for name in names], sums / np.bincount(index)


def _cluster_sums(names: Sequence[str], means: np.ndarray, clusters: Mapping[str, str] | None) -> tuple[np.ndarray, np.ndarray]:
    """(sum of task means [C], number of tasks [C]) per cluster, clusters sorted by name."""
    if clusters is None:
        return means, np.ones(len(means))
    lacking = [name for name in names if name not in clusters]
    if lacking:
        raise StatisticsError(f"task {lacking[0]} belongs to no cluster ({len(lacking)} such tasks); give each task one")
    _, index = np.unique([clusters[name] for name in names], return_inverse=True)
    return np.bincount(index, weights=means), np.bincount(index).astype(np.float64)


def _bootstrap(sums: np.ndarray, sizes: np.ndarray, confidence: float, resamples: int, seed: int) -> tuple[float, float]:
    """Percentile interval of sum(sums) / sum(sizes) when clusters are drawn with replacement."""

    def ratio(drawn: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
        return drawn.sum(axis=axis) / counts.sum(axis=axis)

    found = scipy.stats.bootstrap(
        (sums, sizes),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        batch=max(1, 4_000_000 // len(sums)),
        rng=np.random.default_rng(key64("bootstrap", seed)),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion: (low, high). Raises StatisticsError for n = 0."""
    if n < 1:
        raise StatisticsError("a proportion needs at least one trial")
    found = scipy.stats.binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return float(found.low), float(found.high)


def mean_interval(
    values: Sequence[float] | np.ndarray,
    tasks: Sequence[str],
    *,
    proportion: bool = False,
    clusters: Mapping[str, str] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean over tasks with its cluster bootstrap interval. `proportion`: whether values are proportions.

    If all attempts fail or all succeed, a bootstrap is degenerate: a proportion's interval is then Wilson's, with clusters as
    trials. For other constant values (turns, tokens, costs) the interval is that point. Raises StatisticsError for fewer than two
    clusters, and for a proportion outside [0, 1].
    """
    names, means = task_means(values, tasks)
    sums, sizes = _cluster_sums(names, means, clusters)
    if len(sums) < 2:
        raise StatisticsError(f"an interval needs at least two clusters of tasks, and {len(sums)} was given; enlarge the panel")
    mean = float(sums.sum() / sizes.sum())
    if proportion and not ((means >= 0.0) & (means <= 1.0)).all():
        wrong = int(np.flatnonzero((means < 0.0) | (means > 1.0))[0])
        raise StatisticsError(f"task {names[wrong]} has a mean of {means[wrong]:g}, which is no proportion")
    if proportion and mean in (0.0, 1.0) and bool((means == mean).all()):
        low, high = wilson_interval(round(mean) * len(sums), len(sums), confidence)
        return Interval(mean, low, high, len(names), len(sums), len(tasks), "wilson")
    low, high = _bootstrap(sums, sizes, confidence, resamples, seed)
    return Interval(mean, low, high, len(names), len(sums), len(tasks), "bootstrap")


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Unbiased estimate of the probability of a success among k attempts: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).

    Raises StatisticsError unless 1 <= k <= n and 0 <= successes <= n.
    """
    if not 1 <= k <= n:
        raise StatisticsError(f"pass@{k} needs at least {k} attempts per task, and there are {n}; raise evaluate.attempts")
    if not 0 <= successes <= n:
        raise StatisticsError(f"{successes} successes in {n} attempts is impossible")
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_at_k_by_task(successes: Sequence[bool] | np.ndarray, tasks: Sequence[str], k: int) -> tuple[list[str], np.ndarray]:
    """(task names sorted, pass@k of each [T]); feed these to `mean_interval` as one row per task."""
    names, index, counts = np.unique(np.asarray(tasks, dtype=object).astype(str), return_inverse=True, return_counts=True)
    hits = np.bincount(index, weights=np.asarray(successes, dtype=np.float64)).round().astype(int)
    found = [pass_at_k(int(n), int(c), k) for n, c in zip(counts, hits, strict=True)]
    return [str(name) for name in names], np.array(found)


def distinct_at_k(n: int, counts: Sequence[int], k: int) -> float:
    """Expected number of different solutions in k of a task's n attempts; `counts`: attempts per solution.

    sum_j 1 - C(n - c_j, k) / C(n, k), unbiased; equal to `pass_at_k` if all successes are one solution. Raises StatisticsError
    unless 1 <= k <= n and the counts add up to at most n.
    """
    if sum(counts) > n:
        raise StatisticsError(f"{sum(counts)} successes in {n} attempts is impossible")
    return math.fsum(pass_at_k(n, count, k) for count in counts)


def chance_of_differing(counts: Sequence[int]) -> float | None:
    """Probability that two of a task's successes are different solutions, 1 - sum_j c_j (c_j - 1) / (c (c - 1)) (Simpson's index,
    unbiased); None for fewer than two. Independent of the number of successes."""
    total = sum(counts)
    if total < 2:
        return None
    return 1.0 - sum(count * (count - 1) for count in counts) / (total * (total - 1))


def majority(answers: Sequence[str | None], successes: Sequence[bool]) -> float:
    """Success rate of the most frequent answer of a task's attempts. Attempts without an answer (None) are ignored, ties are
    averaged, and without any answer it is 0. An answer's success rate is the mean over its attempts."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    chosen = [answer for answer, count in votes.items() if count == most]
    return sum(
        sum(success for given, success in zip(answers, successes, strict=True) if given == answer) / most for answer in chosen
    ) / len(chosen)


def maj_at_k(answers: Sequence[str | None], successes: Sequence[bool], k: int, seed: int = 0, subsets: int = 500) -> float:
    """Mean of `majority` over the k-subsets of a task's attempts: all of them, or `subsets` random ones if there are more.

    Raises StatisticsError unless 1 <= k <= n.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise StatisticsError(f"maj@{k} needs at least {k} attempts per task, and there are {n}; raise evaluate.attempts")
    chosen: Iterable[Sequence[int]] = combinations(range(n), k)
    if math.comb(n, k) > subsets:
        rng = np.random.default_rng(key64("maj@k", seed, n, k))
        chosen = [rng.choice(n, size=k, replace=False).tolist() for _ in range(subsets)]
    found = [majority([answers[place] for place in subset], [successes[place] for place in subset]) for subset in chosen]
    return sum(found) / len(found)


def sign_flip_p(differences: np.ndarray, resamples: int, seed: int) -> float:
    """Two-sided p of sum(differences) [C] under random signs of the clusters; exact if 2**C <= resamples. Clusters without a
    difference are left out; p is 1 if fewer than two differ."""
    nonzero = differences[differences != 0.0]
    if len(nonzero) < 2:
        return 1.0

    def total(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(drawn.sum(axis=axis))

    found = scipy.stats.permutation_test(
        (nonzero,),
        total,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        alternative="two-sided",
        batch=max(1, 4_000_000 // len(nonzero)),
        rng=np.random.default_rng(key64("sign-flip", seed)),
    )
    return float(min(1.0, found.pvalue))


def _difference(a: tuple[list[str], np.ndarray], b: tuple[list[str], np.ndarray]) -> np.ndarray:
    """Per-task difference a - b, [T]. Raises StatisticsError unless both have the same tasks."""
    if a[0] != b[0]:
        only_a, only_b = sorted(set(a[0]) - set(b[0])), sorted(set(b[0]) - set(a[0]))
        lacking = [
            f"{len(only)} tasks only the {which} has (such as {only[0]})"
            for which, only in (("first", only_a), ("second", only_b))
            if only
        ]
        raise StatisticsError(
            f"the two models were not evaluated on the same tasks: {'; '.join(lacking)}; evaluate both on one panel"
        )
    return a[1] - b[1]


def compare(
    values_a: Sequence[float] | np.ndarray,
    tasks_a: Sequence[str],
    values_b: Sequence[float] | np.ndarray,
    tasks_b: Sequence[str],
    *,
    clusters: Mapping[str, str] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Model a against model b, paired by task: "better" if the whole interval of mean(a - b) is above 0 and the sign-flip test
    agrees (p at most 1 - confidence), "worse" if it is below and the test agrees.

    Raises StatisticsError if the task lists differ or hold fewer than two clusters.
    """
    first, second = task_means(values_a, tasks_a), task_means(values_b, tasks_b)
    difference = _difference(first, second)
    sums, sizes = _cluster_sums(first[0], difference, clusters)
    if len(sums) < 2:
        raise StatisticsError(f"a comparison needs at least two clusters of tasks, and {len(sums)} was given; enlarge the panel")
    low, high = _bootstrap(sums, sizes, confidence, resamples, seed)
    p = sign_flip_p(sums, resamples, seed)
    # With few differing clusters the bootstrap interval is too narrow; the exact test is not.
    significant = p <= 1.0 - confidence
    verdict: Verdict = "better" if low > 0.0 and significant else "worse" if high < 0.0 and significant else "undecided"
    return Comparison(float(sums.sum() / sizes.sum()), low, high, p, verdict, len(difference), len(sums))
