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
from flows.pipeline import StageResult, run_stage
from flows.process import BAD_PARAMETERS, ROOT, StageFailedError, capture
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


def chosen(methods: list[str] | None, profile: str, root: Path) -> dict[str, str]:
    """The experiments to run, each with DVC's name of its stage, as `python -m stages.claims` chooses them: `methods`, or those
    of the profile; "": those without one. Raises StageFailedError with what it says of unknown ones."""
    options = [*(methods or []), *(["--profile", profile] if profile else [])]
    done = capture([sys.executable, "-m", "stages.claims", "--targets", *options], root)
    if done.returncode:
        raise StageFailedError(done.stderr.strip().removeprefix("claim: "), BAD_PARAMETERS)
    return {target.rpartition("@")[2]: target for target in done.stdout.split()}


@task(retries=0)
def experiment(target: str, root: str) -> StageResult:
    """Run what is missing of one experiment, and evaluate its claims."""
    return run_stage(target, Path(root), {}, logger())


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
        method: experiment.with_options(task_run_name=method)(target, str(folder), return_state=True)
        for method, target in chosen(methods, profile, folder).items()
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
    except StageFailedError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
