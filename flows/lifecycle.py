"""The whole lifecycle as one Prefect flow: `python -m flows.lifecycle`. One task per stage of dvc.yaml, in its order.

Each task brings one stage up to date by `dvc repro`, so the flow and plain `dvc repro` give the same files and the same dvc.lock.
A stage's domains run side by side where there are cores for it; no stage runs beside one that it depends on. A task that fails
for an outside reason is tried again and goes on from the stage's checkpoint; one that fails on its parameters is not. Without a
server (PREFECT_API_URL) Prefect starts one of its own for the run. All runs of one flow run share one parent run in MLflow.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, runtime, task
from prefect.concurrency.sync import concurrency
from prefect.states import Completed, State
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from flows import artifacts
from flows.checkout import only_run
from flows.pipeline import (
    BAD_PARAMETERS,
    ROOT,
    Done,
    StageFailedError,
    on_gpu,
    refresh_packages,
    run_group,
    side_by_side,
    stage_graph,
    stage_items,
)
from flows.tracked import run_environment, tell_mlflow
from stages.runtime.command import command

GPU = "gpu"
"""The concurrency limit that flows/bootstrap.py makes on a server; a run without that server has the stages' own file lock."""
GPU_LEASE_S = 60
REPLAY_S = 60


def known_stage(name: str) -> str:
    if name not in stage_graph(ROOT):
        raise ValueError(f"no stage of dvc.yaml is called '{name}'; there are {', '.join(stage_graph(ROOT))}")
    return name


StageName = Annotated[str, AfterValidator(known_stage), WithJsonSchema({"type": "string", "enum": list(stage_graph(ROOT))})]


class Settings(BaseModel):
    """How to run, not what: that is params.yaml."""

    model_config = ConfigDict(extra="forbid")

    until: StageName | None = Field(
        default=None, title="Last stage", description="Stop after this stage; empty: run all of them."
    )
    jobs: int | None = Field(
        default=None,
        ge=1,
        le=64,
        title="Domains side by side",
        description="Domains of one stage that run at once; empty: as many as the cores carry at resources.threads each.",
    )
    retries: int = Field(
        default=2, ge=0, le=10, title="Retries", description="How often a stage that fails for an outside reason is tried again."
    )
    retry_delay_s: int = Field(
        default=30, ge=0, le=3600, title="Seconds before a retry", description="The stage then goes on from its last checkpoint."
    )


def echo() -> Callable[[str], None]:
    """Where lines go: to Prefect's log where that is kept, else to standard output."""
    logger = get_run_logger()
    return logger.info if logger.isEnabledFor(logging.INFO) else lambda line: print(line, flush=True)


def can_be_retried(task: Any, run: Any, state: State) -> bool:
    """Whether trying again may help: not where the stage's parameters or input are wrong."""
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, StageFailedError) and error.bad_parameters)


@contextlib.contextmanager
def gpu(needed: bool) -> Iterator[None]:
    """Hold the server's one GPU, if the stage computes on it."""
    with concurrency(GPU, occupy=1, lease_duration=GPU_LEASE_S, strict=False) if needed else contextlib.nullcontext():
        yield


@task(retry_condition_fn=can_be_retried)
def stage(name: str, items: list[str], root: str, environment: dict[str, str], jobs: int, on_gpu: bool) -> State:
    """Bring one stage of dvc.yaml up to date. The state's name says whether it ran, was restored or was up to date."""
    say, started = echo(), time.monotonic()
    bars = artifacts.Bars(Path(root), name, say)
    with gpu(on_gpu):
        done = run_group(items, Path(root), environment, say, jobs, bars.update)
    bars.finish()
    artifacts.show_stage(name, done, time.monotonic() - started)
    return Completed(name=done.verdict, message=str(done), data=(done, time.monotonic() - started))


@task(name="params")
def check_params(root: str) -> None:
    """Check params.yaml before anything runs. Raises StageFailedError with what is wrong and what to do."""
    command = [sys.executable, "-m", "stages.params", "--file", str(Path(root) / "params.yaml")]
    checked = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if checked.returncode:
        raise StageFailedError(f"params.yaml cannot be run:\n{checked.stderr.strip()}", BAD_PARAMETERS)


def send_what_is_left(flow: Any, flow_run: Any, state: State) -> None:
    """A run was ended from outside: tell MLflow of the stages killed with it, should their followers have had no time."""
    command = [sys.executable, "-m", "flows.supervise", sys.executable, "-m", "stages.tracking", "--replay"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, timeout=REPLAY_S, capture_output=True, check=False)


@flow(name="lifecycle", on_cancellation=[send_what_is_left], on_crashed=[send_what_is_left])
def lifecycle(settings: Settings = Settings(), root: str = "") -> dict[str, Done]:  # noqa: B008
    """Bring the pipeline of this checkout up to date. Returns what was done per stage; fails with the first that fails.

    Args:
        settings: How to run it.
        root: The checkout; empty: the one that this flow belongs to.
    """
    say, place = echo(), Path(root or ROOT)
    with only_run(place, say):
        done = run_all(place, settings, say)
    return done


def run_all(root: Path, settings: Settings, say: Callable[[str], None]) -> dict[str, Done]:
    identity = str(runtime.flow_run.id)
    environment = run_environment(identity, str(runtime.flow_run.name))
    if (root / "stages" / "params.py").exists():
        check_params(str(root))
    refresh_packages(root, environment, say)
    gpu_stages, jobs = on_gpu(root), settings.jobs or side_by_side(root)
    # One DVC command for all domains of a stage where they cannot run side by side: it starts once.
    items = stage_items(root) if jobs > 1 else {}
    states: dict[str, State] = {}
    done: dict[str, tuple[Done, float]] = {}
    for name, needs in stage_graph(root).items():
        states[name] = stage.with_options(
            name=name, task_run_name=name, retries=settings.retries, retry_delay_seconds=settings.retry_delay_s
        )(
            *(name, [name] if name in gpu_stages else items.get(name, [name]), str(root), environment, jobs, name in gpu_stages),
            wait_for=[states[need] for need in needs],
            return_state=True,
        )
        done[name] = states[name].result()
        say(f"lifecycle: {name:<10} {done[name][0]}")
        if name == settings.until:
            break
    tell_mlflow([result for result, _ in done.values()], root, environment, say)
    artifacts.show_run(root, identity, done)
    return {name: result for name, (result, _) in done.items()}


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.lifecycle", description="Bring the pipeline up to date as a Prefect flow."
    )
    parser.add_argument("--until", metavar="STAGE", choices=list(stage_graph(ROOT)), help="stop after this stage")
    parser.add_argument("--jobs", type=int, metavar="N", help="domains of a stage that run at once")
    options = parser.parse_args()
    try:
        lifecycle(Settings(until=options.until, jobs=options.jobs))
    except StageFailedError as error:
        print(f"lifecycle: {error}", file=sys.stderr)
        return BAD_PARAMETERS if error.bad_parameters else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
