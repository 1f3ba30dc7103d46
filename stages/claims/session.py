"""Runs what is missing of an experiment: the gate's start, the tuning runs, the gate's runs, and then seeds up to look after
look, as long as a comparison is open. Every finished run is written before the next one, so that a session that was killed goes
on."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from stages.claims.arms import common_values, run_values, start_key, start_values, trained_values
from stages.claims.checks import unplayable
from stages.claims.code import MODULES
from stages.claims.cost import cost_of
from stages.claims.experiment import Experiment, peers, profiles
from stages.claims.gates import judge_gate
from stages.claims.judging import is_open, looks_of, write
from stages.claims.plan import Outcome, Run, metrics_of, planned_runs
from stages.claims.results import Results
from stages.claims.runner import ExperimentRunner
from stages.claims.tuning import check_trial, chosen_values, trial_runs
from stages.records.sections import params_hash
from stages.runtime.workspace import RunFailedError

Played = tuple[Run, Outcome | Exception]
"""A run with its outcome or error."""


def outcomes(groups: Iterable[Sequence[Run]], play: Callable[[Run], Outcome], jobs: int) -> Iterator[list[Played]]:
    """The runs of each group, which are done one after another, as the groups finish."""

    def one(run: Run) -> Played:
        try:
            return run, play(run)
        except (RunFailedError, OSError) as error:
            return run, error

    def one_by_one(group: Sequence[Run]) -> list[Played]:
        return [one(run) for run in group if not over.is_set()]

    over, pool = threading.Event(), ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(one_by_one, group) for group in groups]):
            yield future.result()
    finally:
        over.set()  # after Ctrl-C too, which has ended the runs in progress: start no others
        pool.shutdown(cancel_futures=True)


def current_keys(experiment: Experiment, params: dict[str, Any], results: Results) -> dict[str, set[str]]:
    """The keys that the stored runs may have, by name: of an arm that is not tuned yet, those of all its values."""
    tuned, keys = chosen_values(experiment, results), {}
    names = [name.rpartition("/") for name in results.outcomes]
    arms = [arm for arm in experiment.arms if any(arm == name[0] for name in names)]
    seeds = sorted({int(seed) for _, _, seed in names} & set(experiment.seeds))
    for value in experiment.tune.values if experiment.tune else (None,):
        settings = {arm: tuned.get(arm, value) for arm in arms if experiment.tunes(arm) and value is not None}
        for run in planned_runs(experiment, params, settings, seeds, arms):
            keys.setdefault(run.name, set()).add(run.key)
    return keys


def drop_outdated(experiment: Experiment, params: dict[str, Any], results: Results) -> int:
    """Drop runs and trials that were made with other parameters; how many."""
    trials = {trial.name: trial.key for trial in trial_runs(experiment, params)} if results.trials else {}
    kept = {name: one for name, one in results.trials.items() if trials.get(name) == one["key"]}
    dropped, results.trials = len(results.trials) - len(kept), kept
    dropped += results.drop_others(current_keys(experiment, params, results))
    keyed = [arm for arm in experiment.arms if arm in results.start_keys]
    results.drop_starts({arm: start_key(run_values(experiment, arm, 0, params)) for arm in keyed})
    return dropped


@dataclass
class Session:
    """One experiment being brought up to date; `failed` counts runs that failed."""

    root: Path
    slug: str
    experiment: Experiment
    params: dict[str, Any]
    runner: ExperimentRunner
    jobs: int
    results: Results = field(default_factory=Results)
    failed: int = 0

    @cached_property
    def others(self) -> list[Results]:
        """Results of the other experiments: their runs take about as long, and may be equal."""
        return [Results.load(self.root, other) for other in peers(profiles(self.root), self.slug)]

    @property
    def same_environment(self) -> list[Results]:
        """Those whose runs with equal keys are equal runs: a key does not tell problems of lane control apart."""
        return [results for results in self.others if results.environment == self.experiment.environment]

    def say(self, text: str) -> None:
        print(f"claim: {self.slug}: {text}", flush=True)

    def save(self) -> dict[str, Any]:
        return write(self.root, self.slug, self.experiment, self.results)

    def load(self) -> None:
        """Read the stored results, without those of other settings."""
        self.results = Results.load(self.root, self.slug)
        self._drop_outdated()

    def workspace_of(self, run: Run) -> str:
        """Name of the run's workspace: two experiments' equal runs have one, and so have runs that differ after training
        alone."""
        trains = self.experiment.lane == "rl" and (run.trial or self.experiment.trains(run.arm))
        return f"run-{params_hash(trained_values(run.values)) if trains else run.key}"

    def by_workspace(self, runs: Iterable[Run]) -> dict[str, list[Run]]:
        """The runs of each workspace, in the order of the first."""
        found: dict[str, list[Run]] = {}
        for run in runs:
            found.setdefault(self.workspace_of(run), []).append(run)
        return found

    def run(self) -> int:
        """Do all that is missing and judge the claims; the number of failed runs."""
        self.load()
        for name in self.by_workspace(self._stored()):
            self.runner.release(name)  # of a session that was killed after it stored the runs
        self._steps()
        for claim in self.save()["claims"]:
            numbers = (claim["difference"], claim["low"], claim["high"])
            difference = "" if None in numbers else " ({:+.4g}, {:+.4g} to {:+.4g})".format(*numbers)
            self.say(f"{claim['says']} {claim['verdict'] or 'not finished'}{difference}")
        return self.failed

    def _drop_outdated(self) -> None:
        if dropped := drop_outdated(self.experiment, self.params, self.results):
            self.say(f"{dropped} runs of other settings dropped")

    def _steps(self) -> None:
        """Gate, tuning and looks, in the order in which they may end the experiment."""
        if not self._start_passes():
            return
        if self._play(trial_runs(self.experiment, self.params)):
            self._drop_outdated()  # what was made with values that were not chosen
        if gate := self.experiment.gate:
            arms = {gate.baseline, *(one.arm for one in gate.require)}
            if self.failed or not self._play(self._trained_with(arms, gate.runs)):
                return
        for seeds in self.experiment.looks:
            if self.failed or not self._gate_passes() or not self._look(seeds):
                return

    def _stored(self) -> list[Run]:
        """The runs and trials that are done."""
        seeds: dict[str, set[int]] = {}
        for name in self.results.outcomes:
            arm, _, seed = name.rpartition("/")
            seeds.setdefault(arm, set()).add(int(seed))
        trials = trial_runs(self.experiment, self.params) if self.results.trials else []
        return [*self._planned(seeds), *(run for run in trials if run.name in self.results.trials)]

    def _trained_with(self, arms: Collection[str], seeds: int) -> list[Run]:
        """The runs of these arms, and those of others that can share their training."""
        runs = self._planned({arm: set(range(seeds)) for arm in self.experiment.arms})
        return [run for group in self.by_workspace(runs).values() if any(one.arm in arms for one in group) for run in group]

    def _start_passes(self) -> bool:
        """Whether the start is within the gate's range; it is measured if it is not known."""
        gate = self.experiment.gate
        if gate and gate.baseline not in self.results.starts:
            values = run_values(self.experiment, gate.baseline, 0, self.params)
            self.results.starts[gate.baseline] = self.runner.start_success(values)
            self.results.start_keys[gate.baseline] = start_key(values)
            self.save()
        return self._gate_passes()

    def _gate_passes(self) -> bool:
        found = judge_gate(self.experiment, self.results)
        if found and not found["passed"]:
            self.say(f"gate failed: {found['why']}")
        return not found or found["passed"]

    def _look(self, seeds: int) -> bool:
        """Run what the look at this number of seeds lacks; whether any claim is open."""
        experiment = self.experiment
        needed = {arm: set(range(seeds)) for arm in experiment.unclaimed_arms} if seeds == experiment.looks[0] else {}
        still = [claim for claim in experiment.claims if is_open(experiment, looks_of(experiment, self.results, claim))]
        for claim in still:
            for arm in (claim.arm, claim.against):
                needed.setdefault(arm, set()).update(range(claim.fresh_from, claim.fresh_from + seeds))
        self._play(self._planned(needed))
        decided = [looks_of(experiment, self.results, claim) for claim in still]
        remaining = sum(is_open(experiment, looks) for looks in decided)
        if still and not self.failed:
            self.say(f"look at {seeds} of {experiment.looks[-1]} seeds: {remaining} of {len(experiment.claims)} comparisons open")
            self.say(cost_of(experiment, self.params, self.results, self.others).line(experiment, self.jobs))
        return remaining > 0

    def _planned(self, needed: Mapping[str, set[int]]) -> list[Run]:
        """The runs of these arms with these seeds, with the arms' tuned values."""
        last = max((seed for seeds in needed.values() for seed in seeds), default=-1)
        arms = [arm for arm in self.experiment.arms if arm in needed]
        runs = planned_runs(self.experiment, self.params, chosen_values(self.experiment, self.results), range(last + 1), arms)
        return [run for run in runs if run.seed in needed[run.arm] or self.experiment.seedless(run.arm)]

    def _play(self, runs: list[Run]) -> bool:
        """Do those of the runs that are missing; whether all succeeded."""
        others = self.same_environment if self.experiment.claims else []  # older runs may lack the curve that a gallery is for
        if reused := self.results.reuse([self.results, *others], runs):
            self.say(f"{reused} runs reused")
            self.save()
        missing = {run.key: run for run in reversed(self.results.missing(runs))}  # equal ones once
        if missing and (why := unplayable(self.experiment, self.params)):
            self.failed += len(missing)
            print(f"claim: {self.slug}: none of {len(missing)} runs is started: {why}", file=sys.stderr, flush=True)
            return False
        if missing:
            self.say(f"{len(missing)} runs to do, {self.jobs} at a time")
        starts = self._by_start(list(reversed(missing.values())))
        self.runner.workers = self.jobs if len(starts) == 1 else 1
        groups = self.by_workspace(in_turn(starts))
        left = len(missing)
        for played in outcomes(groups.values(), self.play, self.jobs):
            left -= len(played)
            stored = [self._store(run, outcome, left) for run, outcome in played]
            if all(stored):
                self.runner.release(self.workspace_of(played[0][0]))
        if self.results.reuse([self.results], runs):
            self.save()
        return not self.failed

    def _store(self, run: Run, outcome: Outcome | Exception, left: int) -> bool:
        """Store and show what a run found; whether it succeeded."""
        if isinstance(outcome, Exception):
            self.failed += 1
            print(f"claim: {self.slug}: {run.name} failed: {outcome}", file=sys.stderr, flush=True)
            return False
        self.results.add(run, outcome)
        self.save()
        shown = ", ".join(f"{name} {'–' if value is None else f'{value:.4g}'}" for name, value in outcome.metrics.items())
        self.say(f"{run.name}: {shown}; {outcome.seconds:.0f} s, {left} runs left")
        return True

    def _by_start(self, runs: list[Run]) -> list[list[Run]]:
        """The runs of each start. A start that all share is made with one process per job, several at the same time with one
        each; those are of different seeds, so that a seed's second start finds what it has in common with the first made."""
        if self.experiment.program in MODULES:
            return [runs]
        groups: dict[str, list[Run]] = {}
        for run in runs:
            groups.setdefault(params_hash(start_values(run.values)), []).append(run)
        earlier: Counter[int] = Counter()  # starts of the same seed
        turns = []
        for group in groups.values():
            turns.append((earlier[group[0].seed], group))
            earlier[group[0].seed] += 1
        return [group for _, group in sorted(turns, key=lambda turn: turn[0])]

    def play(self, run: Run) -> Outcome:
        """Do a run, stored or not. Raises RunFailedError."""
        experiment, runner, values = self.experiment, self.runner, dict(run.values)
        if experiment.lane != "control":
            values["resources"] = {**values["resources"], "workers": 1, "threads": runner.threads}
        metrics = list(run.required) if run.trial else metrics_of(experiment)
        if experiment.program in MODULES:
            return runner.measure(self.workspace_of(run), values, common_values(experiment, self.params), metrics, run.required)
        if experiment.lane == "merge":
            outcome = runner.merge_and_evaluate(self.workspace_of(run), values, metrics, run.required)
            if run.trial:
                check_trial(run.name, outcome, len(experiment.domains))
            return outcome
        trains = run.trial or experiment.trains(run.arm)
        start = runner.start_success(values) if experiment.lane == "rl" and not run.trial else None
        outcome = runner.train_and_evaluate(self.workspace_of(run), values, metrics, trains, run.required)
        if run.trial:
            check_trial(run.name, outcome)
        return replace(outcome, start=start)


def in_turn(groups: Sequence[Sequence[Run]]) -> list[Run]:
    """A run of each group, then the next of each, so that runs side by side make their starts at the same time."""
    return [run for turn in zip_longest(*groups) for run in turn if run is not None]
