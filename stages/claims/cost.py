"""What an experiment will still cost, estimated before it starts: runs, environment steps and minutes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

from stages.claims.experiment import Claim, Experiment
from stages.claims.gates import judge_gate
from stages.claims.judging import counted_runs, is_open, looks_of
from stages.claims.plan import planned_runs
from stages.claims.results import Results, cost_in_seconds
from stages.claims.sequential import forecast
from stages.claims.tuning import chosen_values, trial_runs
from stages.control.problems import PROBLEMS

SIMULATIONS = 100
"""Of a forecast of a claim's seeds: about +-0.6 seeds."""


@dataclass(frozen=True)
class Cost:
    """`runs` are expected, `most` if no comparison is decided before the last look. `seconds`: of all runs one after another,
    None if no run was timed before. `trials`: tuning runs, in `runs` and `most` too."""

    trials: int
    runs: int
    most: int
    environment_steps: int
    seconds: float | None
    still_open: int

    def line(self, experiment: Experiment, jobs: int) -> str:
        """For people, with `jobs` runs at a time."""
        if not self.most:
            return f"nothing to run; {len(experiment.claims)} claims, {self.still_open} open"
        tuning = f" ({self.trials} of them tuning)" if self.trials else ""
        steps = f", {self.environment_steps:,} environment steps" if self.environment_steps else ""
        time = "time unknown" if self.seconds is None else f"about {self.seconds / 60 / jobs:.0f} minutes, {jobs} at a time"
        counted = f"{len(experiment.claims)} claims, {self.still_open} open"
        return f"about {self.runs} runs{tuning}, at most {self.most}{steps}, {time}; {counted}"


@cache
def _expected_seeds(sd: float, margin: float, looks: tuple[int, ...]) -> float:
    return forecast(sd, margin, looks, simulations=SIMULATIONS).seeds


def spread(experiment: Experiment, results: Results, claim: Claim) -> float | None:
    """Standard deviation of the claim's paired differences over the seeds so far; None for fewer than three."""
    arms = [arm for arm in (claim.arm, claim.against) if not experiment.seedless(arm)]
    runs = [counted_runs(experiment, results, claim, arm) for arm in arms]
    values = [[results.value(run, claim.metric) or 0.0 for run in of] for of in runs]
    differences = [of[0] - of[-1] if len(of) > 1 else of[0] for of in zip(*values, strict=False)]
    return stdev(differences) if len(differences) > 2 else None


def usual_spread(metric: str, sources: Iterable[Results]) -> float | None:
    """Standard deviation of the difference of two arms' runs, from the median over arms of that of their runs; None without any
    arm of three runs with the metric."""
    found = []
    for results in sources:
        by_arm: dict[str, list[float]] = {}
        for name, outcome in results.outcomes.items():
            if (value := outcome["metrics"].get(metric)) is not None:
                by_arm.setdefault(name.rpartition("/")[0], []).append(value)
        found += [stdev(values) for values in by_arm.values() if len(values) > 2]
    return sqrt(2) * median(found) if found else None


def _seeds(experiment: Experiment, results: Results, others: Iterable[Results], claim: Claim) -> float:
    """Expected number of seeds until the claim is decided if there is no difference; that of the looks taken if it is decided."""
    looks = looks_of(experiment, results, claim)
    if not is_open(experiment, looks):
        return looks[-1].seeds
    sources = (spread(experiment, results, claim), usual_spread(claim.metric, [results]), usual_spread(claim.metric, others))
    sd = next((one for one in sources if one is not None), None)
    if sd is None:
        return experiment.looks[-1]
    done = looks[-1].seeds if looks else 0
    left = next(seeds for seeds in experiment.looks if seeds > done)
    return max(left, _expected_seeds(round(sd, 3), claim.margin, tuple(experiment.looks)))


def _seconds(experiment: Experiment, results: Results, others: Iterable[Results]) -> float | None:
    """Mean duration of a run, with the starts that runs made: of this experiment's. Without any, of the others' in its
    environment, or in any: by their environment steps, if it has a budget. Runs of lane control, whose steps take a thousandth of
    a language model's, tell nothing about other lanes, nor these about it."""
    own = list(map(cost_in_seconds, (*results.outcomes.values(), *results.trials.values())))
    if own:
        return fmean(own)
    alike = [of for of in others if (of.environment in PROBLEMS) == (experiment.lane == "control")]
    found = [(of.environment == experiment.environment, one) for of in alike for one in of.outcomes.values()]
    if experiment.budget is not None:
        found = [(same, one) for same, one in found if one["environment_steps"]]
    timed = [one for same, one in found if same] or [one for _, one in found]
    if not timed:
        return None
    if experiment.budget is None:
        return fmean(map(cost_in_seconds, timed))
    per_step = median(one["seconds"] / one["environment_steps"] for one in timed)
    return experiment.budget.environment_steps * per_step + fmean(one.get("start_seconds", 0.0) for one in timed)


def _with_shared(experiment: Experiment, params: Mapping[str, Any], results: Results, others: Iterable[Results]) -> Results:
    """`results`, and what a session would take from `others`: runs with the same settings."""
    alike = [of for of in others if of.environment == experiment.environment and experiment.claims]
    found = replace(results, **{name: dict(getattr(results, name)) for name in ("outcomes", "trials", "starts")})
    found.reuse(alike, trial_runs(experiment, params))
    last = max((claim.fresh_from for claim in experiment.claims), default=0) + experiment.looks[-1]
    found.reuse(alike, planned_runs(experiment, params, chosen_values(experiment, found), range(last)))
    return found


def cost_of(experiment: Experiment, params: Mapping[str, Any], results: Results, others: Sequence[Results]) -> Cost:
    """`results`: without outdated runs. `others`: results of other experiments, or of this one's outdated runs. Nothing more
    after a gate that failed, nor for runs that another experiment has."""
    timed, results = results, _with_shared(experiment, params, results, others)
    if (gate := judge_gate(experiment, results)) and not gate["passed"]:
        return Cost(0, 0, 0, 0, 0.0, 0)
    trials = len({run.key for run in results.missing(trial_runs(experiment, params))})
    expected = {arm: set(range(experiment.looks[0])) for arm in experiment.unclaimed_arms}
    most = {arm: set(seeds) for arm, seeds in expected.items()}
    still_open = 0
    for claim in experiment.claims:
        seeds, last = _seeds(experiment, results, others, claim), experiment.looks[-1]
        undecided = is_open(experiment, looks_of(experiment, results, claim))
        still_open += undecided
        for arm in (claim.arm, claim.against):
            for needed, count in ((expected, round(seeds)), (most, last if undecided else round(seeds))):
                needed.setdefault(arm, set()).update(range(claim.fresh_from, claim.fresh_from + count))
    runs, limit = (trials + sum(_missing(experiment, results, *arm) for arm in needed.items()) for needed in (expected, most))
    steps = runs * experiment.budget.environment_steps if experiment.budget else 0
    mean = _seconds(experiment, timed, others)
    return Cost(trials, runs, limit, steps, None if mean is None else runs * mean, still_open)


def _missing(experiment: Experiment, results: Results, arm: str, seeds: set[int]) -> int:
    """How many runs the arm lacks of those with these seeds."""
    done = {int(seed) for name, _, seed in (run.rpartition("/") for run in results.outcomes) if name == arm}
    return int(not done) if experiment.seedless(arm) else len(seeds - done)
