"""claim: run the experiments of reports/claims/<slug>.yaml and evaluate their claims.

reports/claims/<slug>.yaml and params.yaml -> reports/claims/<slug>.json, rewritten after every run. `python -m stages.claims
lite_ppo` runs one experiment, without a name all. Runs whose results are in the file, or in another experiment's with the same
parameters, are not repeated; delete the file to repeat an experiment. `--check` validates the experiments and prints their cost.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from stages.claims.experiment import (
    FOLDER,
    Experiment,
    check_environments,
    check_experiment,
    common_values,
    load_experiment,
    slugs,
)
from stages.claims.results import Results, Run, metrics_of, planned_runs, required_of, result_path
from stages.claims.runner import MODULES, ExperimentRunner, clean_commit
from stages.params import load_params
from stages.runtime.command import command
from stages.runtime.parent import die_with_parent
from stages.runtime.validation import ParamsError
from stages.runtime.workspace import RunFailedError

JOBS = "BELLWETHER_JOBS"
"""Environment variable: concurrent runs."""


def default_jobs(device: str) -> int:
    """One single-threaded run per core, faster than one run on all cores; one run on an accelerator."""
    return int(os.environ.get(JOBS, 0)) or (os.cpu_count() or 1 if device == "cpu" else 1)


def outcomes(
    runs: list[Run], play: Callable[[Run], dict[str, Any]], jobs: int
) -> Iterator[tuple[Run, dict[str, Any] | Exception]]:
    """Each run with its outcome or error, as they finish."""
    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = {pool.submit(play, run): run for run in runs}
        for future in as_completed(waiting):
            error = future.exception()
            if error is not None and not isinstance(error, (RunFailedError, OSError)):
                raise error
            yield waiting[future], error if isinstance(error, Exception) else future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C too, which has ended the runs in progress: start no others


def one_experiment(
    root: Path, slug: str, experiment: Experiment, params: dict[str, Any], runner: ExperimentRunner, jobs: int
) -> int:
    """Run what is missing of an experiment and evaluate its claims; the number of failed runs."""
    path = result_path(root, slug)
    runs, results = planned_runs(experiment, params), Results.load(path)
    results.drop_others(runs)
    others = [Results.load(result_path(root, other)) for other in slugs(root) if other != slug]
    reused = results.reuse(others, runs)
    if reused:
        print(f"claim: {slug}: {reused} runs reused from other experiments", flush=True)
        results.write(path, experiment)
    missing = results.missing(runs)
    print(f"claim: {slug}: {len(missing)} of {len(runs)} runs to do, {jobs} at a time", flush=True)

    def play(run: Run) -> dict[str, Any]:
        name, metrics = f"{slug}-{run.arm}-{run.seed}-{run.key}", metrics_of(experiment)
        values = dict(run.values)
        if experiment.lane != "offline_q":
            values["resources"] = {**values["resources"], "workers": 1, "threads": runner.threads}
        if experiment.lane in MODULES:
            return runner.measure(experiment.lane, name, values, common_values(experiment, params), metrics)
        trains = experiment.lane == "rl"
        success = runner.start_success(values)
        if trains:
            results.starts[run.arm] = success  # the same for every seed
        return runner.train_and_evaluate(name, values, metrics, trains, required_of(experiment, run.arm))

    failed = 0
    for run, outcome in outcomes(missing, play, jobs):
        if isinstance(outcome, Exception):
            failed += 1
            print(f"claim: {slug}: {run.name} failed: {outcome}", file=sys.stderr, flush=True)
            continue
        results.outcomes[run.name] = {**outcome, "key": run.key}
        results.write(path, experiment)
        shown = ", ".join(f"{name} {'–' if value is None else f'{value:.4g}'}" for name, value in outcome["metrics"].items())
        left = len(results.missing(runs))
        print(f"claim: {slug}: {run.name}: {shown}; {outcome['seconds']:.0f} s, {left} runs left", flush=True)
    for claim in results.write(path, experiment)["claims"]:
        difference = (
            "" if claim["difference"] is None else f" ({claim['difference']:+.4g}, {claim['low']:+.4g} to {claim['high']:+.4g})"
        )
        print(f"claim: {slug}: {claim['says']} {claim['verdict'] or 'not finished'}{difference}", flush=True)
    return failed


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.claims", description=(__doc__ or "").strip())
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="experiments in reports/claims (default: all)")
    parser.add_argument("--jobs", type=int, help=f"concurrent runs, about 1 GB of memory each (default: {JOBS}, or one per core)")
    parser.add_argument("--check", action="store_true", help="validate the experiments without running them")
    options = parser.parse_args()
    die_with_parent()
    root = Path.cwd()
    try:
        known = slugs(root)
        unknown = sorted(set(options.slugs) - set(known))
        if unknown:
            raise ParamsError(f"unknown experiment {', '.join(unknown)}; {FOLDER} has {', '.join(known)}")
        params = load_params(root / "params.yaml").model_dump()
        experiments = {slug: load_experiment(root / FOLDER / f"{slug}.yaml") for slug in options.slugs or known}
        for slug, experiment in experiments.items():
            source = f"{FOLDER}/{slug}.yaml"
            check_environments(check_experiment(experiment, params, source), source)
        device = params["resources"]["device"]
        jobs = options.jobs or default_jobs(device)
        if options.check:
            for slug, experiment in experiments.items():
                runs = len(experiment.arms) * len(experiment.seeds)
                steps = f"{runs * experiment.budget.environment_steps:,} environment steps, " if experiment.budget else ""
                print(f"claim: {slug}: {runs} runs, {steps}{len(experiment.claims)} claims")
            return 0
        threads = 1 if jobs > 1 else params["resources"]["threads"]
        runner = ExperimentRunner(root, clean_commit(root), threads, workers=jobs)
        failed = sum(one_experiment(root, slug, one, params, runner, jobs) for slug, one in experiments.items())
    except (ParamsError, RunFailedError) as error:
        print(f"claim: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
