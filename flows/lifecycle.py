"""The whole lifecycle as one Prefect flow: `python -m flows.lifecycle`. One task per stage of dvc.yaml, in its order.

Each task is one `dvc repro` of that stage, so the flow and plain `dvc repro` give the same files and the same dvc.lock. Without a
server (PREFECT_API_URL) Prefect starts one of its own for the run. All runs of one flow run share one parent run in MLflow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prefect import flow, runtime, task

from flows.pipeline import ROOT, Done, StageFailedError, run_stage, stage_graph
from flows.tracked import tell_mlflow


def say(line: str) -> None:
    print(line, flush=True)


@task(retries=0)
def stage(name: str, root: str, lifecycle: str) -> Done:
    """Bring one stage of dvc.yaml up to date."""
    return run_stage(name, Path(root), {"LIFECYCLE_RUN_ID": lifecycle}, say)


@flow(name="lifecycle")
def lifecycle(root: str = str(ROOT)) -> dict[str, Done]:
    """Bring the pipeline of checkout `root` up to date. Returns what was done per stage; fails with the first that fails."""
    identity = str(runtime.flow_run.id)
    states: dict = {}
    done: dict[str, Done] = {}
    for name, needs in stage_graph(Path(root)).items():
        states[name] = stage.with_options(name=name)(
            name, root, identity, wait_for=[states[need] for need in needs], return_state=True
        )
        done[name] = states[name].result()
    for name, result in done.items():
        say(f"lifecycle: {name:<10} {result}")
    tell_mlflow(done.values(), Path(root), identity, str(runtime.flow_run.name), say)
    return done


def main() -> int:
    checked = subprocess.run([sys.executable, "-m", "stages.params"], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if checked.returncode:
        return checked.returncode
    try:
        lifecycle()
    except StageFailedError as error:
        print(f"lifecycle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
