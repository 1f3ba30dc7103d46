"""The board of claims as a Prefect flow: `python -m flows.claims [METHOD ...]`. One task per experiment of reports/claims.

What is done stays done, so a run that was interrupted, or one that is scheduled, does what is missing. Equal to `make claims`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import yaml
from prefect import flow, task
from pydantic import WithJsonSchema

from flows.lifecycle import echo
from flows.pipeline import ROOT, Done, StageFailedError, run_stage
from stages.runtime.command import command

PIPELINE = Path("reports/claims/dvc.yaml")


def known_methods(root: Path) -> list[str]:
    """The experiments that reports/claims/dvc.yaml lists; none without that file."""
    if not (root / PIPELINE).exists():
        return []
    return yaml.safe_load((root / PIPELINE).read_text(encoding="utf-8"))["stages"]["claim"]["matrix"]["method"]


Method = Annotated[str, WithJsonSchema({"type": "string", "enum": known_methods(ROOT)})]
"""So that the UI offers those there are, and the server refuses others."""


def chosen(methods: list[str] | None, root: Path) -> list[str]:
    """The experiments to run: `methods`, or all. Raises ValueError, naming those there are, for one that there is not."""
    known = known_methods(root)
    unknown = sorted(set(methods or []) - set(known))
    if unknown:
        raise ValueError(f"no experiment {', '.join(unknown)} in reports/claims; there are {', '.join(known)}")
    return methods or known


def target(method: str) -> str:
    """What DVC calls the stage of an experiment."""
    return f"{PIPELINE}:claim@{method}"


@task(retries=0)
def experiment(method: str, root: str) -> Done:
    """Run what is missing of one experiment, and judge it."""
    return run_stage(target(method), Path(root), {}, echo())


@task(name="board", retries=0)
def board(root: str) -> None:
    """Write the board's pages and the documents' generated blocks. Raises StageFailedError."""
    command = [sys.executable, "-m", "stages.reporting.documents"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise StageFailedError(f"the board could not be written: {done.stderr.strip()}")


@flow(name="claims")
def claims(methods: list[Method] | None = None, root: str = "") -> dict[str, Done]:
    """Bring the board of claims up to date. An experiment that fails leaves the others; the first failure is raised at the end.

    Args:
        methods: Names of experiments in reports/claims, such as lite_ppo; empty: all.
        root: The checkout; empty: the one that this flow belongs to.
    """
    place = Path(root or ROOT)
    states = {
        method: experiment.with_options(task_run_name=method)(method, str(place), return_state=True)
        for method in chosen(methods, place)
    }
    board(str(place))
    done = {method: state.result() for method, state in states.items()}
    say = echo()
    for method, result in done.items():
        say(f"claims: {method:<16} {result}")
    return done


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.claims", description="Bring the board of claims up to date.")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="experiments in reports/claims; all by default")
    options = parser.parse_args()
    try:
        claims(options.methods or None)
    except (StageFailedError, ValueError) as error:
        print(f"claims: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
