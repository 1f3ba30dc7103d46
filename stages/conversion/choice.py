"""S4 and S6 as pure functions: which model serves a cluster, what a call costs, and whether a specialist is promoted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.conversion.settings import Router, SelectModel


@dataclass(frozen=True)
class Scored:
    """A candidate: `score` on validation calls, `cost` of a call relative to others, `parameters`, milliseconds of a call."""

    name: str
    score: float
    cost: float
    parameters: float = 0.0
    latency_ms: float = 0.0
    licence: str = "apache-2.0"


def select(candidates: Sequence[Scored], settings: SelectModel) -> Scored | None:
    """The cheapest candidate whose score is at least that of the best minus the tolerance, among those that meet size, latency
    and licence; None: the cluster stays with the large model."""
    meeting = [
        one
        for one in candidates
        if one.parameters <= settings.max_params
        and one.latency_ms <= settings.max_latency_ms
        and one.licence in settings.licence_allow
    ]
    if not meeting:
        return None
    least = max(one.score for one in meeting) - settings.tolerance - 1e-12
    return min((one for one in meeting if one.score >= least), key=lambda one: (one.cost, -one.score, one.name))


@dataclass(frozen=True)
class Share:
    """A cluster's share of the calls; `kept`: the share of these that its specialist answers; `rho`: cost(S) / cost(T)."""

    weight: float
    kept: float
    rho: float


def cost_per_call(served: Sequence[Share]) -> float:
    """Relative to the large model: sum_k w_k [rho_k + (1 - a_k)] over served clusters, and the weight of the others. A call that
    falls back pays both."""
    return sum(one.weight * (one.rho + 1 - one.kept) for one in served) + 1 - sum(one.weight for one in served)


def replaceable_share(served: Sequence[Share]) -> float:
    """sum_k w_k a_k."""
    return sum(one.weight * one.kept for one in served)


def lower_bound(differences: Sequence[float], traces: Sequence[str], settings: Router, seed: int) -> float:
    """The one-sided lower confidence bound of the mean difference (specialist minus large model), by a paired bootstrap over
    traces."""
    names, index = np.unique(np.asarray(traces, dtype=object).astype(str), return_inverse=True)
    sums = np.bincount(index, weights=np.asarray(differences, dtype=np.float64), minlength=len(names))
    sizes = np.bincount(index, minlength=len(names))
    drawn = np.random.default_rng(seed).integers(len(names), size=(settings.resamples, len(names)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    return float(np.quantile(means, 1 - settings.confidence))


def promotion(
    differences: Sequence[float], traces: Sequence[str], confirmed: int, settings: Router, seed: int
) -> tuple[float | None, str]:
    """The lower bound of quality_SLM - quality_LLM (None without test calls), and why the specialist is not promoted; "": it is,
    since the bound is at least -epsilon.

    `confirmed`: how many of the calls the large model got right. Only these can show that a specialist is worse: where both are
    wrong, they tie, so that with too few of them any specialist would pass.
    """
    bound = lower_bound(differences, traces, settings, seed) if len(differences) else None
    if bound is None:
        return None, "no test call with a reported outcome is answered with enough confidence"
    if confirmed < (least := settings.min_calls):
        return bound, f"{confirmed} confirmed test calls are answered with enough confidence; router.min_calls is {least}"
    return bound, "" if bound >= -settings.epsilon - 1e-12 else "worse than the large model"


def calibrated(confidences: Sequence[float], correct: Sequence[bool], wanted: float, floor: float) -> float:
    """The lowest threshold from `floor` on with which the accepted calls are correct at the share `wanted`; above 1 if none is,
    since fine-tuned models are too sure of themselves."""
    for threshold in sorted({floor, *(value for value in confidences if value > floor)}):
        accepted = [right for value, right in zip(confidences, correct, strict=True) if value >= threshold]
        if accepted and sum(accepted) / len(accepted) >= wanted - 1e-12:
            return threshold
    return float("inf")
