import math

import numpy as np
import pytest

from stages.claims.inference import Sample, compare
from stages.evaluation.statistics import StatisticsError


def crossed(*table: list[float]) -> Sample:
    return Sample(np.array(table), np.ones(len(table[0])))


def zero_arm(like: Sample) -> Sample:
    """An arm without seeds whose values are all 0."""
    return Sample(np.zeros((1, *like.values.shape[1:])), like.sizes, seedless=True)


def against_zero(sample: Sample, alpha: float = 0.05):
    return compare(sample, zero_arm(sample), alpha)


def test_interval_over_seeds() -> None:
    """Differences 0.1, 0.2, 0.2, 0.1: mean 0.15, sum of squares 4 * 0.05^2 = 0.01, standard error sqrt(0.01 / 3 / 4) = 0.028868;
    t(3) is 3.182446 at 97.5 % and 2.353363 at 95 %."""
    found = compare(Sample(np.array([0.6, 0.7, 0.8, 0.5])), Sample(np.array([0.5, 0.5, 0.6, 0.4])), 0.05)
    assert found.difference == pytest.approx(0.15)
    assert (found.low, found.high) == pytest.approx((0.15 - 0.091869, 0.15 + 0.091869), abs=1e-6)
    assert (found.margin_low, found.margin_high) == pytest.approx((0.15 - 0.067936, 0.15 + 0.067936), abs=1e-6)
    assert (found.seeds, found.clusters) == (4, 0)


def test_interval_over_seeds_and_clusters() -> None:
    """Rows (0.1, 0.3) and (0.3, 0.7): row means 0.2 and 0.5, column means 0.2 and 0.5, mean 0.35.
    V_s = V_c = (0.15^2 + 0.15^2) / (2 * 1) = 0.0225. Residuals are +-0.05: V_sc = 4 * 0.05^2 / 1 / 4 = 0.0025.
    Variance 0.0225 + 0.0225 - 0.0025 = 0.0425; degrees of freedom 0.0425^2 / (0.0225^2 + 0.0225^2 + 0.0025^2) = 1.773.
    t's 75 % point is tan(pi / 4) = 1 with 1 and sqrt(2 / 3) = 0.816497 with 2 degrees of freedom, with 1.773 in between."""
    found = against_zero(crossed([0.1, 0.3], [0.3, 0.7]), 0.5)
    assert found.difference == pytest.approx(0.35)
    error = math.sqrt(0.0425)
    assert 0.816497 * error < found.high - 0.35 < 1.0 * error
    assert found.high - 0.35 == pytest.approx(0.844 * error, rel=0.01)
    assert (found.seeds, found.clusters) == (2, 2)


def standard_error(sample: Sample) -> float:
    """The half-width at the level at which the quantile of t with many degrees of freedom is 1."""
    found = against_zero(sample, 0.317310508)
    return found.high - found.difference


def test_variance_matches_the_corrected_crossed_bootstrap() -> None:
    """Contract: resampling seeds, clusters or both gives variances s, c and b; the residual's part is in s and c once and in b
    three times, so the unbiased variance is 2 (s + c) - b. Clusters of 1 to 3 tasks."""
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 4, size=60)
    table = rng.normal(0, 0.3, (40, 1)) + rng.normal(0, 0.2, 60) + rng.normal(0, 2, (40, 60))
    seeds = rng.multinomial(40, np.full(40, 1 / 40), size=20_000)
    clusters = rng.multinomial(60, np.full(60, 1 / 60), size=20_000) * sizes
    clusters = clusters / clusters.sum(axis=1, keepdims=True)
    by_seed = (seeds @ (table @ (sizes / sizes.sum())) / 40).var()
    by_cluster = (clusters @ table.mean(axis=0)).var()
    both = ((seeds @ table / 40) * clusters).sum(axis=1).var()
    expected = math.sqrt(2 * (by_seed + by_cluster) - both)
    assert standard_error(Sample(table, sizes)) == pytest.approx(expected, rel=0.05)
    assert both > 1.5 * expected**2


def test_intervals_have_nominal_coverage_over_seeds_and_clusters() -> None:
    """800 panels of 40 clusters at 8 seeds: the share of 90 % intervals without the true difference, 0, is within 4 standard
    errors of 10 %; intervals over seeds alone miss it more than twice as often."""
    rng = np.random.default_rng(7)
    panels = rng.normal(0, 1, (800, 8, 1)) + rng.normal(0, 3, (800, 1, 40)) + rng.normal(0, 4, (800, 8, 40))
    missed = np.mean([found.low > 0 or found.high < 0 for found in (against_zero(crossed(*one), 0.1) for one in panels)])
    assert missed == pytest.approx(0.1, abs=4 * math.sqrt(0.1 * 0.9 / 800))
    alone = np.mean([found.low > 0 or found.high < 0 for found in (against_zero(Sample(one.mean(1)), 0.1) for one in panels)])
    assert alone > 0.2


def test_panel_error_remains_with_many_seeds() -> None:
    """Contract: identical runs still leave uncertainty about other tasks."""
    tasks = np.array([0.0, 0.1, 0.3, 0.0, 0.2, 0.1])
    eight, many = (against_zero(crossed(*[list(tasks)] * seeds)) for seeds in (8, 400))
    # Standard error sd(tasks) / sqrt(6), and t(5) at 97.5 % is 2.570582.
    assert many.high - many.low == pytest.approx(2 * 2.570582 * tasks.std(ddof=1) / math.sqrt(6), rel=0.03)
    assert eight.high - eight.low == pytest.approx(many.high - many.low, rel=0.05)
    untrained = against_zero(Sample(tasks[None], np.ones(6), seedless=True))
    assert untrained.high - untrained.low == pytest.approx(2 * 2.570582 * tasks.std(ddof=1) / math.sqrt(6))
    assert (untrained.seeds, untrained.clusters) == (0, 6)


def test_arm_without_seeds_is_compared_with_each_seed() -> None:
    trained, start = crossed([0.5, 0.7], [0.6, 0.9], [0.4, 0.6]), crossed([0.2, 0.3])
    repeated = crossed(*[[0.2, 0.3]] * 3)
    assert compare(trained, Sample(start.values, start.sizes, seedless=True), 0.05) == compare(trained, repeated, 0.05)


def test_tasks_have_equal_weight_in_clusters_of_any_size() -> None:
    values = np.array([[1.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.0, 1.0, 0.5, 1.0]])
    sample = Sample.of_tasks(values, ["b", "a", "b", "b", "c"])
    assert sample.sizes is not None
    assert sample.sizes.tolist() == [1, 3, 1]
    assert sample.values[0].tolist() == pytest.approx([0.0, 2 / 3, 1.0])
    assert against_zero(sample).difference == pytest.approx(values.mean())
    assert sample.first(1).seeds == 1


def test_p_is_at_most_alpha_iff_the_interval_excludes_zero() -> None:
    rng = np.random.default_rng(3)
    for table in rng.normal(0.4, 1, (40, 8, 12)):
        p = against_zero(crossed(*table)).p
        for alpha in (0.999 * p, 1.001 * p, 0.01, 0.05):
            found = against_zero(crossed(*table), alpha)
            assert (found.p <= alpha) == (found.low > 0 or found.high < 0)


def test_margin_interval_has_twice_the_level() -> None:
    sample = Sample(np.random.default_rng(0).normal(size=9))
    one, two = against_zero(sample, 0.02), against_zero(sample, 0.04)
    assert (one.margin_low, one.margin_high) == pytest.approx((two.low, two.high))


START = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7], dtype=np.float32)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Sample(np.full(8, 0.07)), Sample(np.zeros(8))),
        (Sample(START + np.float32(0.2)), Sample(START)),
        (Sample(np.arange(1, 9) / 3), Sample((np.arange(8) / 3).round(6))),
        (crossed(*[[0.2, 0.2]] * 8), crossed(*[[0.1, 0.1]] * 8)),
    ],
)
def test_equal_differences_are_degenerate(a: Sample, b: Sample) -> None:
    """Contract: an interval of width 0, up to rounding, is never significant."""
    found = compare(a, b, 0.05)
    assert found.degenerate
    assert (found.low, found.high, found.p) == (found.difference, found.difference, 1.0)


def test_incomparable_samples_are_rejected() -> None:
    five, one = Sample(np.arange(5.0)), Sample(np.zeros(1), seedless=True)
    for a, b, message in (
        (five, Sample(np.arange(4.0)), "paired by seed, but one arm has 5 seeds and the other 4"),
        (five, crossed([1.0, 2.0]), "the same clusters of tasks, or neither any"),
        (crossed([1.0, 2.0]), Sample(np.ones((1, 2)), np.array([1, 2])), "the same clusters"),
        (five.first(1), one, "two seeds, or two clusters if nothing trains: 1 and 0"),
        (one, one, "two seeds, or two clusters if nothing trains: 0 and 0"),
    ):
        with pytest.raises(StatisticsError, match=message):
            compare(a, b, 0.05)
    with pytest.raises(StatisticsError, match="values must be finite"):
        Sample(np.array([1.0, np.nan]))
    with pytest.raises(StatisticsError, match="positive number of tasks"):
        Sample(np.ones((2, 2)), np.array([1, 0]))
    with pytest.raises(StatisticsError, match="one row of values, not 2"):
        Sample(np.ones(2), seedless=True)
    with pytest.raises(StatisticsError, match="each needs its cluster"):
        Sample.of_tasks(np.ones((2, 3)), ["a", "b"])
