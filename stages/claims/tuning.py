"""Every arm's own settings, chosen on validation tasks: each is tried at the same values with seeds that no claim uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stages.claims.arms import run_values
from stages.claims.experiment import Experiment
from stages.claims.plan import Outcome, Run, key_of, shaping
from stages.claims.results import Results
from stages.curation.settings import Curate
from stages.records.sections import deep_merge
from stages.runtime.workspace import RunFailedError

FIRST_SEED = 1000
VALID = 96
"""Least number of validation tasks."""
SEEDS = {"valid": 1}
"""The tasks are drawn anew: not every file in data/raw has so many."""
METRIC = "panel.success"


def _on_validation_tasks(values: dict[str, Any]) -> dict[str, Any]:
    curate = values["curate"]
    overrides: dict[str, Any] = {"evaluate": {"split": "valid"}}
    if curate.get("valid", Curate.model_fields["valid"].default) < VALID:
        overrides["curate"] = {"valid": VALID, "seeds": {**SEEDS, **curate.get("seeds", {})}}
    return deep_merge(values, overrides)


def trial_runs(experiment: Experiment, params: Mapping[str, Any]) -> list[Run]:
    """All tuning runs, named `<arm>/<value>/<seed>`; [] if nothing is tuned."""
    tune, runs = experiment.tune, []
    for seed in range(FIRST_SEED, FIRST_SEED + tune.seeds) if tune else ():
        for arm in filter(experiment.tunes, experiment.arms):
            for value in tune.values:
                first = _on_validation_tasks(run_values(experiment, arm, FIRST_SEED, params, value))
                key = key_of(experiment, shaping(experiment, first), seed)
                values = deep_merge(first, experiment.seeded(seed))
                runs.append(Run(f"{arm}/{value!r}", seed, values, key, (METRIC,), trial=True))
    return runs


def check_trial(name: str, outcome: Outcome, domains: int = 1) -> None:
    """Raise RunFailedError if a tuning run played fewer than VALID tasks per domain. `domains`: how many there are; each has as
    many tasks as the others."""
    if (played := len(outcome.rows) // domains) < VALID:
        raise RunFailedError(
            f"{name} played {played} validation tasks, and a choice takes {VALID}; draw them anew by "
            f"`shared: {{curate: {{valid: {VALID}, seeds: {{valid: 1}}}}}}`"
        )


def tried_values(experiment: Experiment, results: Results) -> dict[str, dict[str, list[float]]]:
    """Arm -> value -> success on validation tasks, per tuning seed done."""
    found: dict[str, dict[str, list[float]]] = {}
    for arm in experiment.arms if experiment.tune else ():
        for value in experiment.tune.values if experiment.tune else ():
            names = [f"{arm}/{value!r}/{FIRST_SEED + index}" for index in range(experiment.tune.seeds)]
            done = [results.trials[name]["metrics"][METRIC] for name in names if name in results.trials]
            if done:
                found.setdefault(arm, {})[repr(value)] = done
    return found


def chosen_values(experiment: Experiment, results: Results) -> dict[str, int | float]:
    """Arm -> its value of `tune.key`: the best mean success, the smallest of equal ones; arms whose trials are not all done
    lack."""
    chosen, tune = {}, experiment.tune
    for arm, tried in tried_values(experiment, results).items():
        assert tune is not None
        if len(tried) == len(tune.values) and all(len(done) == tune.seeds for done in tried.values()):
            chosen[arm] = max(tune.values, key=lambda value: (sum(tried[repr(value)]), -value))
    return chosen


def are_tuned(experiment: Experiment, results: Results, arms: Iterable[str]) -> bool:
    """Whether each of these arms has its own settings; runs of those that lack them may be of others."""
    chosen = chosen_values(experiment, results)
    return experiment.tune is None or all(arm in chosen for arm in arms if experiment.tunes(arm))
