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


def last_scores(runs: Mapping[str, Any], until: int | None = None) -> np.ndarray:
    """Mean return of each run's evaluations in the second half of `until` steps (None: all), [R, 1]: less noisy than the last
    alone."""
    count = len(runs["steps"]) if until is None else sum(step <= until for step in runs["steps"])
    returns = np.asarray(runs["returns"], dtype=float)
    return returns[:, count // 2 : count].mean(1, keepdims=True)


def improvement(ours: Mapping[str, Any], other: Mapping[str, Any]) -> Bounded:
    """Probability that a run of `ours` ends higher than one of `other`, on the same task, after as many steps: those of the
    shorter one."""
    until = min(ours["steps"][-1], other["steps"][-1])
    scores = (last_scores(runs, until) for runs in (ours, other))
    return stratified_bootstrap(probability_of_improvement, *scores, resamples=RESAMPLES)
