"""Statistics over runs against numbers by hand, from rliable's definitions."""

from __future__ import annotations

import numpy as np
import pytest

from stages.evaluation.aggregates import (
    iqm,
    probability_of_improvement,
    stratified_bootstrap,
)
from stages.evaluation.statistics import StatisticsError


def test_interquartile_mean_by_hand() -> None:
    """Of eight scores the two lowest and the two highest are dropped; of ten, int(2.5) = 2 on each side."""
    assert iqm(np.array([[0, 1, 2, 3], [4, 5, 6, 100]])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert iqm(np.array([[0, 1, 2, 3, 4], [5, 6, 7, 8, 1000]])) == pytest.approx((2 + 3 + 4 + 5 + 6 + 7) / 6)
    assert iqm(np.array([[0.25]])) == 0.25


def test_interquartile_mean_pools_the_scores_of_all_tasks() -> None:
    scores = np.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0], [3.0, 13.0]])
    assert iqm(scores) == pytest.approx((2 + 3 + 10 + 11) / 4)


def test_probability_of_improvement_by_hand() -> None:
    """Task 1: of the pairs (1,0) (1,2) (3,0) (3,2) three are won: 3/4. Task 2: all are equal: 1/2. Mean 5/8."""
    x, y = np.array([[1, 5], [3, 5]]), np.array([[0, 5], [2, 5]])
    assert probability_of_improvement(x, y) == pytest.approx(5 / 8)
    assert probability_of_improvement(x, y) + probability_of_improvement(y, x) == pytest.approx(1.0)
    assert probability_of_improvement(x + 100, y) == 1.0
    assert probability_of_improvement(np.array([[1.0]]), np.array([[0.0], [1.0], [2.0], [0.5]])) == pytest.approx(2.5 / 4)
    with pytest.raises(StatisticsError, match="same tasks"):
        probability_of_improvement(x, y[:, :1])


def test_bootstrap_resamples_within_strata() -> None:
    """Runs are resampled within a task, so that a statistic of a constant task never varies."""
    rng = np.random.default_rng(0)
    scores = np.column_stack([np.full(20, 7.0), rng.normal(0.0, 1.0, 20)])
    fixed = stratified_bootstrap(lambda drawn: float(drawn[:, 0].mean()), scores, resamples=200)
    assert (fixed.value, fixed.low, fixed.high) == (7.0, 7.0, 7.0)
    moving = stratified_bootstrap(lambda drawn: float(drawn[:, 1].mean()), scores, resamples=4000)
    spread = scores[:, 1].std() / np.sqrt(20)
    assert moving.low == pytest.approx(moving.value - 1.96 * spread, abs=0.06)
    assert moving.high == pytest.approx(moving.value + 1.96 * spread, abs=0.06)


def test_bootstrap_is_deterministic_and_resamples_sides_independently() -> None:
    x, y = np.array([[0.1], [0.2], [0.6]]), np.array([[0.1], [0.3], [0.5]])
    one, other = (stratified_bootstrap(probability_of_improvement, x, y, resamples=300, seed=4) for _ in range(2))
    assert one == other
    assert one.low <= one.value <= one.high
    # Resampled jointly, equal arrays would always tie.
    same = stratified_bootstrap(probability_of_improvement, x, x, resamples=300)
    assert same.value == 0.5
    assert same.low < 0.5 < same.high


@pytest.mark.parametrize("scores", [[], [[]], [1.0, 2.0], [[float("inf")]]])
def test_invalid_scores_are_rejected(scores: list) -> None:
    with pytest.raises(StatisticsError, match=r"\[runs, tasks\]"):
        iqm(np.array(scores))


def test_statistics_are_rliable_s() -> None:
    """Interquartile mean and probability of improvement as the package computes them."""
    metrics = pytest.importorskip("rliable.metrics")
    rng = np.random.default_rng(0)
    for runs, others in ((9, 7), (8, 8), (3, 5)):
        x, y = rng.normal(0.3, 1.0, (runs, 3)).round(1), rng.normal(0.0, 1.0, (others, 3)).round(1)
        assert iqm(x) == pytest.approx(metrics.aggregate_iqm(x))
        assert probability_of_improvement(x, y) == pytest.approx(metrics.probability_of_improvement(x, y))
