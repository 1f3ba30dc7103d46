"""`python -m stages.reporting.keep [--note TEXT]`: add the finished run to reports/runs.jsonl, to compare later runs with it.

An entry holds parameters, hashes of the code, success with the outcome of every panel task, work done, and time and memory
measured on this machine. Commit the file with the results it describes. The evaluation's episodes are copied to data/kept (not
in git): the viewer of later reports shows them beside those of the new run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.evaluation.stored_episodes import FILE as STORED
from stages.params import load_params
from stages.reporting.inputs import load_inputs
from stages.reporting.kept import FILE, Measured, Run, append, episodes_path, newest
from stages.reporting.results import on_panels
from stages.reporting.this_run import this_run
from stages.runtime.command import command
from stages.runtime.costs import current_costs
from stages.runtime.files import atomic_bytes
from stages.runtime.yaml_files import read_yaml
from stages.tracking import git_state

PAGE = "report"
"""The stage that reads the file; it need not be up to date."""


class KeepError(RuntimeError):
    """The run cannot be kept; the message states the reason and the remedy."""


def out_of_date(root: Path) -> list[str]:
    """Stages of dvc.yaml, except the report, that are not up to date. Raises KeepError if DVC fails."""
    command = [sys.executable, "-m", "dvc", "status", "--json"]
    env = {**os.environ, "DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise KeepError(f"'dvc status' failed: {done.stderr.strip()}\nIf a run is in progress, wait until it ends")
    changed = {name.rsplit(":", 1)[-1] for name in json.loads(done.stdout or "{}")}
    own = set(read_yaml(root / "dvc.yaml")["stages"])
    return sorted(name for name in changed if name.split("@")[0] in own - {PAGE})


def measurements(root: Path, domains: Sequence[str], transfer: Sequence[str]) -> dict[str, Measured]:
    """Stage (`rl@search`) -> cost of its run on the current inputs, for the stages that ran on them on this machine."""
    costs = {title: cost for title, cost in current_costs(root, domains, transfer).items() if cost and title != PAGE}
    return {title: Measured(**{key: getattr(cost, key) for key in Measured.model_fields}) for title, cost in costs.items()}


def keep_episodes(root: Path, run: Run) -> None:
    """Copy the evaluation's episodes to those of the kept runs."""
    if (root / STORED).exists():
        atomic_bytes(episodes_path(root, run), (root / STORED).read_bytes())


def keep(root: Path, note: str = "") -> int:
    """Add the run in `root` to the file; returns its number. A run that is already in the file is not added again.

    Raises KeepError if the outputs are out of date, there is no finished run, or it was not evaluated on the frozen panels.
    """
    if stale := out_of_date(root):
        raise KeepError(
            f"these stages are not up to date with params.yaml, data and code: {', '.join(stale)}. Run 'dvc repro' first, or "
            f"revert the edit"
        )
    params = load_params(root / "params.yaml")
    try:
        inputs = load_inputs(root, params)
    except FileNotFoundError as error:
        raise KeepError(str(error)) from error
    if not on_panels(inputs.evaluation):
        raise KeepError(
            "kept runs are compared on the frozen panels, and this one was evaluated on validation tasks; set evaluate.split in "
            "params.yaml to test and run 'dvc repro' first"
        )
    now = this_run(inputs)
    keep_episodes(root, now)
    if own := newest(now, inputs.kept, identical=True):
        return own[0]
    commit, dirty = git_state(root)
    name = "" if commit == "none" else commit[:12] + ("+" if dirty else "")
    measured = measurements(root, params.domains, params.evaluate.transfer)
    append(root, Run(**{**now.model_dump(), "note": note, "commit": name, "measured": measured}))
    return len(inputs.kept) + 1


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.reporting.keep", description="Keep this run for comparison with later ones."
    )
    parser.add_argument("--note", default="", help="a short description of the run")
    options = parser.parse_args()
    root = Path.cwd()
    before = (root / FILE).read_bytes() if (root / FILE).exists() else b""
    try:
        number = keep(root, options.note)
    except (KeepError, ValueError) as error:
        print(f"keep: {error}", file=sys.stderr)
        return 1
    if (root / FILE).read_bytes() == before:
        print(f"keep: this is run {number} in {FILE}; nothing added")
    else:
        print(f"keep: added run {number} to {FILE}. Run 'dvc repro report' to show it, and commit the file with the results")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
