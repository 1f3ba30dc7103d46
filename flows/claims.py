"""The board of claims as a Prefect flow: `python -m flows.claims [METHOD ...] [--profile gemma-270m]`. One task per experiment of
reports/claims.

Finished runs are not repeated: an interrupted or scheduled flow runs what is missing. Equivalent to `make claims`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Annotated

from prefect import flow, task
from pydantic import WithJsonSchema

from flows.lifecycle import logger
from flows.pipeline import StageResult, read_settings, run_stage
from flows.process import ROOT, StageFailedError, capture
from stages.runtime.command import command
from stages.runtime.yaml_files import read_yaml

PIPELINE = Path("reports/claims/dvc.yaml")


def known_methods(root: Path) -> list[str]:
    """The experiments that reports/claims/dvc.yaml lists; none without that file."""
    if not (root / PIPELINE).exists():
        return []
    return read_yaml(root / PIPELINE)["stages"]["claim"]["matrix"]["method"]


Method = Annotated[str, WithJsonSchema({"type": "string", "enum": known_methods(ROOT)})]
"""An enum: the UI offers the experiments, and the server rejects other names."""


def chosen(methods: list[str] | None, profile: str, root: Path) -> list[str]:
    """The experiments to run: `methods`, or those of the profile, whose model must be there; "": those without one. Raises
    ValueError for unknown ones, listing those that exist, and for a profile without any."""
    known = known_methods(root)
    unknown = sorted(set(methods or []) - set(known))
    if unknown:
        raise ValueError(f"unknown experiment {', '.join(unknown)}; reports/claims has {', '.join(known)}")
    if methods:
        return methods
    files = {name: root / PIPELINE.with_name(f"{name}.yaml") for name in known}
    profiles = {name: read_settings(file).get("profile") if file.exists() else None for name, file in files.items()}
    if profile and profile not in profiles.values():
        named = sorted({own for own in profiles.values() if own})
        raise ValueError(f"no experiment has the profile {profile}; reports/claims has {', '.join(named) or 'none'}")
    return [name for name, own in profiles.items() if own == (profile or None)]


def target(method: str) -> str:
    """DVC's name of an experiment's stage."""
    return f"{PIPELINE}:claim@{method}"


@task(retries=0)
def experiment(method: str, root: str) -> StageResult:
    """Run what is missing of one experiment, and evaluate its claims."""
    return run_stage(target(method), Path(root), {}, logger())


@task(name="board", retries=0)
def board(root: str) -> None:
    """Write the board's pages and the documents' generated blocks. Raises StageFailedError."""
    done = capture([sys.executable, "-m", "stages.reporting.documents"], Path(root))
    if done.returncode:
        raise StageFailedError(f"cannot write the board: {done.stderr.strip()}")


@flow(name="claims")
def claims(methods: list[Method] | None = None, profile: str = "", root: str = "") -> dict[str, StageResult]:
    """Bring the board of claims up to date. A failed experiment does not stop the others; the first failure is raised at the end.

    Args:
        methods: Names of experiments in reports/claims, such as lite_ppo; empty: all of the profile.
        profile: The profile of the experiments to run, such as gemma-270m, whose model must be there; empty: those without one.
        root: The checkout; empty: that of this flow.
    """
    folder = Path(root or ROOT)
    states = {
        method: experiment.with_options(task_run_name=method)(method, str(folder), return_state=True)
        for method in chosen(methods, profile, folder)
    }
    board(str(folder))
    done = {method: state.result() for method, state in states.items()}
    log = logger()
    for method, result in done.items():
        log(f"claims: {method:<16} {result}")
    return done


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.claims", description="Bring the board of claims up to date.")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="experiments in reports/claims; none: all of the profile")
    parser.add_argument("--profile", default="", help="such as gemma-270m; none: the experiments without a profile")
    options = parser.parse_args()
    try:
        claims(options.methods or None, options.profile)
    except (StageFailedError, ValueError) as error:
        print(f"claims: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
