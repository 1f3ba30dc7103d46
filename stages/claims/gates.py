"""Whether an experiment can decide anything, judged before its seeds are spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # loads scipy.stats when it is first used

from stages.claims.experiment import Experiment, Gate
from stages.claims.plan import LEARNT
from stages.claims.results import Results
from stages.claims.tuning import are_tuned

CONFIDENCE = 0.95
DIGITS = 6


def rises(first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether last - first is above 0: one-sided t test over the runs at 95 %. Equal differences: whether these are."""
    differences = np.asarray(last) - np.asarray(first)
    error = float(differences.std(ddof=1)) / np.sqrt(len(differences))
    return float(differences.mean()) > float(scipy.stats.t.ppf(CONFIDENCE, len(differences) - 1)) * error


def start_failure(gate: Gate, start: float) -> str | None:
    """Why the start does not pass, or None."""
    low, high = gate.start
    if low <= start <= high:
        return None
    return f"the start solves {start:.1%} of the panel, not {low:.0%} to {high:.0%}"


def _failure(gate: Gate, results: Results, start: float, end: list[float], learnt: tuple[list[float], list[float]]) -> str | None:
    if (found := start_failure(gate, start)) is not None:
        return found
    first, last = learnt
    low, high = gate.end
    if not low <= (mean := float(np.mean(end))) <= high:
        return f"'{gate.baseline}' ends at {mean:.1%} of the panel, not between {low:.0%} and {high:.0%}"
    if not rises(first, last):
        return f"'{gate.baseline}' does not learn: {np.mean(first):.1%} at first, {np.mean(last):.1%} at last"
    for one in gate.require:
        values = [results.value(f"{one.arm}/{seed}", one.metric) for seed in range(gate.runs)]
        mean = float(np.mean([value for value in values if value is not None]))
        if not one.range[0] <= mean <= one.range[1]:
            return f"{one.metric} of '{one.arm}' is {mean:.3g}, not {one.range[0]:g} to {one.range[1]:g}"
    return None


def judge_gate(experiment: Experiment, results: Results) -> dict[str, Any] | None:
    """The gate as the file has it: `passed`, success of the start, at the end, and in the first and last fifth of the curve (of
    an arm whose runs lack one: of the start and at the end), by seed, and `why` it failed (null: it did not). None without a
    gate, or while its arms are not tuned or runs that it needs are missing, unless the start fails already."""
    gate = experiment.gate
    start = results.starts.get(gate.baseline) if gate else None
    if gate is None or start is None:
        return None
    runs = [f"{gate.baseline}/{seed}" for seed in range(gate.runs)]
    needed = [(run, "panel.success") for run in runs]
    needed += [(f"{one.arm}/{seed}", one.metric) for one in gate.require for seed in range(gate.runs)]
    if not are_tuned(experiment, results, {gate.baseline, *(one.arm for one in gate.require)}) or any(
        results.value(*one) is None for one in needed
    ):
        why = start_failure(gate, start)
        return {"passed": False, "start": start, "end": [], "first": [], "last": [], "why": why} if why else None
    end, first, last = ([results.value(run, metric) for run in runs] for metric in ("panel.success", *LEARNT))
    if None in first:  # the arm plays no episodes while it trains, or its runs are older than the curves that are kept
        first, last = [start] * gate.runs, end
    why = _failure(gate, results, start, end, (first, last))
    figures = {name: [round(one, DIGITS) for one in of] for name, of in (("end", end), ("first", first), ("last", last))}
    return {"passed": why is None, "start": start, **figures, "why": why}
