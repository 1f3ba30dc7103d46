"""claim: run the experiments of reports/claims/<slug>.yaml and evaluate their claims.

reports/claims/<slug>.yaml and params.yaml -> reports/claims/<slug>.json, rewritten after every run, and the Parquet files in
reports/claims/rows and reports/claims/curves. `python -m stages.claims lite_ppo` runs one experiment, no name all that have no
profile, `--profile gemma-270m` those of that profile. Runs whose results are in the file, or in another experiment's with the
same parameters, are not repeated; delete the file to repeat an experiment. `--check` validates the experiments and prints what
they will cost, `--judge` judges the claims anew without running anything, `--confirm` repeats a run of each arm that older code
made. `python -m stages.claims verdict SLUG [CLAIM]` prints verdicts and exits with 0 (reproduced), 1 (not) or 2 (undecided);
`python -m stages.claims new SLUG` writes a new experiment.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from stages.claims import new, verdict
from stages.claims.code import code_of
from stages.claims.confirm import confirm
from stages.claims.cost import cost_of
from stages.claims.entries import Entry, chosen, entry_of, load_entries
from stages.claims.experiment import peers, profiles
from stages.claims.judging import write
from stages.claims.new import PIPELINE
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


def print_costs(root: Path, entries: Mapping[str, Entry], jobs: int) -> None:
    """What each experiment will still cost, and all of them."""
    profile_of = profiles(root)
    timed = {slug: Results.load(root, slug) for slug in profile_of}
    runs, seconds, unknown = 0, 0.0, 0
    for slug, entry in entries.items():
        results = Results.load(root, slug)
        drop_outdated(entry.experiment, entry.params, results)
        others = [timed[name] for name in (slug, *peers(profile_of, slug))]
        cost = cost_of(entry.experiment, entry.params, results, others)
        unknown += cost.runs > 0 and cost.seconds is None
        runs, seconds = runs + cost.runs, seconds + (cost.seconds or 0.0)
        print(f"claim: {slug}: {cost.line(entry.experiment, jobs)}", flush=True)
    untimed = f", without {unknown} experiments whose runs were never timed" if unknown else ""
    print(f"claim: in all about {runs} runs, {seconds / 3600 / jobs:.1f} hours, {jobs} at a time{untimed}", flush=True)


def judge_again(root: Path, entries: Mapping[str, Entry]) -> None:
    """Write the verdicts anew from the stored runs, without those that the experiments no longer describe."""
    for slug, entry in entries.items():
        results = Results.load(root, slug)
        dropped = drop_outdated(entry.experiment, entry.params, results)
        if results.outcomes or results.trials or dropped:
            write(root, slug, entry.experiment, results)
        print(f"claim: {slug}: judged {len(results.outcomes)} runs; {dropped} of other settings dropped", flush=True)


def sessions(root: Path, entries: Mapping[str, Entry], jobs: int) -> Iterator[Session]:
    """A session of each experiment at the commit that is checked out. Raises RunFailedError if code or data differ from it."""
    commit = clean_commit(root)
    for entry in entries.values():
        code_of(root, entry.experiment.program)  # now, as it is at this commit: the checkout may change while runs take hours
    for slug, entry in entries.items():
        threads = 1 if jobs > 1 else entry.params["resources"]["threads"]
        with closing(ExperimentRunner(root, commit, threads, workers=jobs, program=entry.experiment.program)) as runner:
            yield Session(root, slug, entry.experiment, entry.params, runner, jobs)


@command
def main() -> int:
    if sys.argv[1:2] == ["verdict"]:
        return verdict.main(sys.argv[2:])
    if sys.argv[1:2] == ["new"]:
        params = load_params(Path.cwd() / "params.yaml").model_dump()
        return new.main(sys.argv[2:], lambda experiment, file: entry_of(Path.cwd(), experiment, params, file), params)
    parser = argparse.ArgumentParser(prog="python -m stages.claims", description=(__doc__ or "").strip())
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="experiments in reports/claims (default: all without profile)")
    parser.add_argument("--profile", help="the experiments of this profile, such as gemma-270m")
    memory = "about 1 GB of memory each, 7 GB with Gemma 3 270M"
    parser.add_argument("--jobs", type=int, help=f"concurrent runs, {memory} (default: {JOBS}, or one per core)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--targets", action="store_true", help="print the experiments' stages for `dvc repro`")
    only.add_argument("--check", action="store_true", help="validate the experiments and print what they will cost")
    only.add_argument("--judge", action="store_true", help="judge the stored runs again without running anything")
    only.add_argument("--confirm", action="store_true", help="repeat a run of each arm of older code, and compare the results")
    options = parser.parse_args()
    die_with_parent()
    root = Path.cwd()
    try:
        if options.targets:
            print(*(f"{PIPELINE}:claim@{slug}" for slug in chosen(root, options.slugs, options.profile)))
            return 0
        params = load_params(root / "params.yaml").model_dump()
        entries = load_entries(root, options.slugs, params, options.profile)
        jobs = options.jobs or default_jobs(params["resources"]["device"])
        if options.judge:
            judge_again(root, entries)
            return 0
        if options.confirm:
            confirmed = [confirm(session) for session in sessions(root, entries, jobs)]
            return 0 if all(confirmed) else 1
        print_costs(root, entries, jobs)
        failed = 0 if options.check else sum(session.run() for session in sessions(root, entries, jobs))
    except (GitError, ParamsError, RunFailedError) as error:
        print(f"claim: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
