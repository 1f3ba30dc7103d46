"""Learning curves and comparisons of the lane's methods, after rliable (stages/evaluation/aggregates.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stages.evaluation.aggregates import Bounded, iqm, probability_of_improvement, stratified_bootstrap

RESAMPLES = 1000


def iqm_curve(returns: Sequence[Sequence[float]]) -> list[Bounded]:
    """Interquartile means over runs, with 95 % intervals, of each evaluation of [R, E]."""
    scores = np.asarray(returns, dtype=float)
    return [stratified_bootstrap(iqm, scores[:, [place]], resamples=RESAMPLES) for place in range(scores.shape[1])]


def last_scores(runs: Mapping[str, Any]) -> np.ndarray:
    """Mean return of each run's evaluations in the second half, [R, 1]: less noisy than the last alone."""
    returns = np.asarray(runs["returns"], dtype=float)
    return returns[:, returns.shape[1] // 2 :].mean(1, keepdims=True)


def improvement(ours: Mapping[str, Any], other: Mapping[str, Any]) -> Bounded:
    """Probability that a run of `ours` ends higher than one of `other`, on the same task."""
    return stratified_bootstrap(probability_of_improvement, last_scores(ours), last_scores(other), resamples=RESAMPLES)
