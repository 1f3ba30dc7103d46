"""claim: run the experiments of reports/claims/<slug>.yaml and evaluate their claims.

reports/claims/<slug>.yaml and params.yaml -> reports/claims/<slug>.json, rewritten after every run, and the Parquet files in
reports/claims/rows and reports/claims/curves. `python -m stages.claims lite_ppo` runs one experiment, without a name all. Runs
whose results are in the file, or in another experiment's with the same parameters, are not repeated; delete the file to repeat an
experiment. `--check` validates the experiments and prints what they will cost, `--judge` judges the claims anew without running
anything, `--confirm` repeats one run of each arm that older code made. `python -m stages.claims verdict SLUG [CLAIM]` prints
verdicts and exits with 0 (reproduced), 1 (not) or 2 (undecided); `python -m stages.claims new SLUG` writes a new experiment.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.claims import new, verdict
from stages.claims.checks import check_environments, check_experiment
from stages.claims.confirm import confirm
from stages.claims.cost import cost_of
from stages.claims.experiment import FOLDER, Experiment, load_experiment, slugs
from stages.claims.judging import write
from stages.claims.results import Results
from stages.claims.runner import ExperimentRunner, clean_commit
from stages.claims.session import Session, drop_outdated
from stages.params import load_params
from stages.runtime.command import command
from stages.runtime.cores import concurrent_runs
from stages.runtime.git import GitError
from stages.runtime.parent import die_with_parent
from stages.runtime.validation import ParamsError
from stages.runtime.workspace import RunFailedError

JOBS = "BELLWETHER_JOBS"
"""Environment variable: concurrent runs."""


def default_jobs(device: str) -> int:
    """JOBS, else `concurrent_runs`."""
    return int(os.environ.get(JOBS, 0)) or concurrent_runs(device)


def load_experiments(root: Path, names: list[str], params: dict[str, Any]) -> dict[str, Experiment]:
    """Experiments by name, all for none. Raises ParamsError for unknown names and invalid experiments."""
    known = slugs(root)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ParamsError(f"unknown experiment {', '.join(unknown)}; {FOLDER} has {', '.join(known)}")
    experiments = {slug: load_experiment(root / FOLDER / f"{slug}.yaml") for slug in names or known}
    for slug, experiment in experiments.items():
        check_whole(experiment, params, f"{FOLDER}/{slug}.yaml")
    return experiments


def check_whole(experiment: Experiment, params: dict[str, Any], source: str) -> None:
    """Raise ParamsError for an experiment whose arms are no valid params.yaml; `source`: its file."""
    check_environments(check_experiment(experiment, params, source), source)


def print_costs(root: Path, experiments: dict[str, Experiment], params: dict[str, Any], jobs: int) -> None:
    """What each experiment will still cost, and all of them."""
    stored = {slug: Results.load(root, slug) for slug in slugs(root)}
    runs, seconds = 0, 0.0
    for slug, experiment in experiments.items():
        drop_outdated(experiment, params, stored[slug])
        others = [results for name, results in stored.items() if name != slug]
        cost = cost_of(experiment, params, stored[slug], others)
        runs, seconds = runs + cost.runs, seconds + (cost.seconds or 0.0)
        print(f"claim: {slug}: {cost.line(experiment, jobs)}", flush=True)
    print(f"claim: in all about {runs} runs, {seconds / 3600 / jobs:.1f} hours, {jobs} at a time", flush=True)


def judge_again(root: Path, experiments: dict[str, Experiment], params: dict[str, Any]) -> None:
    """Write the verdicts anew from the stored runs, without those that the experiments no longer describe."""
    for slug, experiment in experiments.items():
        results = Results.load(root, slug)
        dropped = drop_outdated(experiment, params, results)
        if results.outcomes or results.trials or dropped:
            write(root, slug, experiment, results)
        print(f"claim: {slug}: judged {len(results.outcomes)} runs; {dropped} of other settings dropped", flush=True)


def sessions(root: Path, experiments: dict[str, Experiment], params: dict[str, Any], jobs: int) -> Iterator[Session]:
    """A session of each experiment at the commit that is checked out. Raises RunFailedError if code or data differ from it."""
    threads, commit = 1 if jobs > 1 else params["resources"]["threads"], clean_commit(root)
    for slug, experiment in experiments.items():
        runner = ExperimentRunner(root, commit, threads, workers=jobs, program=experiment.program)
        yield Session(root, slug, experiment, params, runner, jobs)


@command
def main() -> int:
    if sys.argv[1:2] == ["verdict"]:
        return verdict.main(sys.argv[2:])
    if sys.argv[1:2] == ["new"]:
        params = load_params(Path.cwd() / "params.yaml").model_dump()
        return new.main(sys.argv[2:], lambda experiment, file: check_whole(experiment, params, file), params)
    parser = argparse.ArgumentParser(prog="python -m stages.claims", description=(__doc__ or "").strip())
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="experiments in reports/claims (default: all)")
    parser.add_argument("--jobs", type=int, help=f"concurrent runs, about 1 GB of memory each (default: {JOBS}, or one per core)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="validate the experiments and print what they will cost")
    only.add_argument("--judge", action="store_true", help="judge the stored runs again without running anything")
    only.add_argument("--confirm", action="store_true", help="repeat a run of each arm of older code, and compare the results")
    options = parser.parse_args()
    die_with_parent()
    root = Path.cwd()
    try:
        params = load_params(root / "params.yaml").model_dump()
        experiments = load_experiments(root, options.slugs, params)
        jobs = options.jobs or default_jobs(params["resources"]["device"])
        if options.judge:
            judge_again(root, experiments, params)
            return 0
        if options.confirm:
            confirmed = [confirm(session) for session in sessions(root, experiments, params, jobs)]
            return 0 if all(confirmed) else 1
        print_costs(root, experiments, params, jobs)
        failed = 0 if options.check else sum(session.run() for session in sessions(root, experiments, params, jobs))
    except (GitError, ParamsError, RunFailedError) as error:
        print(f"claim: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
