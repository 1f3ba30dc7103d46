"""The whole lifecycle as one Prefect flow: `python -m flows.lifecycle`. One task per item of dvc.yaml.

Each task brings one stage (of one domain) up to date by `dvc repro`, so the flow and plain `dvc repro` write the same files and
dvc.lock. Tasks that need nothing of each other run side by side. A failed task is retried and resumes from the stage's
checkpoint, unless its parameters were rejected. Without a server (PREFECT_API_URL) Prefect starts one for the run. All stages of
a flow run share one parent run in MLflow.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.concurrency.sync import concurrency
from prefect.futures import PrefectFuture
from prefect.states import Completed, State
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from flows import arguments, artifacts
from flows.checkout import run_lock
from flows.pipeline import (
    StageResult,
    concurrent_stages,
    gpu_stages,
    refresh_packages,
    run_items,
    stage_graph,
    up_to,
)
from flows.process import BAD_PARAMETERS, ROOT, ChildProcesses, Echo, StageFailedError, capture
from flows.schedule import run_graph
from flows.tracked import log_to_mlflow, run_environment
from stages.runtime.command import command
from stages.runtime.process import wait_supervised

GPU = "gpu"
"""The concurrency limit that flows/bootstrap.py makes on a server; without a server the stages' own file lock applies."""
GPU_LEASE_S = 60
REPLAY_S = 60


def known_stage(name: str) -> str:
    if name not in stage_graph(ROOT):
        raise ValueError(f"unknown stage '{name}'; dvc.yaml has {', '.join(stage_graph(ROOT))}")
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
        le=arguments.MOST_STAGES,
        title="Stages side by side",
        description=(
            "Stages, such as rl@search, that run at a time where none needs another; empty: two, or one where cores or memory do "
            "not allow two."
        ),
    )
    retries: int = Field(
        default=2, ge=0, le=10, title="Retries", description="How often a failed stage is retried; bad parameters are not."
    )
    retry_delay_s: int = Field(
        default=30, ge=0, le=3600, title="Seconds before a retry", description="The stage then resumes from its last checkpoint."
    )


def logger() -> Echo:
    """Prefect's logger if it is enabled, else standard output."""
    log = get_run_logger()
    return log.info if log.isEnabledFor(logging.INFO) else lambda line: print(line, flush=True)


def can_be_retried(task: Any, run: Any, state: State) -> bool:
    """Whether to retry: not if the stage's parameters or input were rejected, or someone asked it to stop."""
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, StageFailedError) and (error.bad_parameters or error.stopped))


@contextlib.contextmanager
def gpu(needed: bool) -> Iterator[None]:
    """Hold the server's GPU limit, if the stage uses the GPU."""
    with concurrency(GPU, occupy=1, lease_duration=GPU_LEASE_S, strict=False) if needed else contextlib.nullcontext():
        yield


# Nothing to cache: DVC knows what is up to date.
@task(retry_condition_fn=can_be_retried, cache_policy=NO_CACHE)
def stage(item: str, root: str, environment: dict[str, str], on_gpu: bool, children: ChildProcesses) -> State:
    """Bring one item of dvc.yaml up to date. The name of the state is Ran, Restored or UpToDate."""
    log, started = logger(), time.monotonic()
    bars = artifacts.ProgressBars(Path(root), item, log)
    with gpu(on_gpu):
        result = run_items({item: []}, Path(root), environment, log, tick=bars.update, children=children)[item]
    bars.finish()
    seconds = time.monotonic() - started
    artifacts.show_stage(item, result, seconds)
    return Completed(name=result.state, message=str(result), data=(result, seconds))


@task(name="params")
def check_params(root: str) -> None:
    """Check params.yaml before any stage runs. Raises StageFailedError with the message of stages.params."""
    checked = capture([sys.executable, "-m", "stages.params", "--file", str(Path(root) / "params.yaml")], Path(root))
    if checked.returncode:
        raise StageFailedError(f"params.yaml is invalid:\n{checked.stderr.strip()}", BAD_PARAMETERS)


def replay_tracking(flow: Any, flow_run: Any, state: State) -> None:
    """After a run was killed: log its stages' end to MLflow, in case their followers had no time to."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.suppress(subprocess.TimeoutExpired):
        wait_supervised([sys.executable, "-m", "stages.tracking", "--replay"], REPLAY_S, cwd=ROOT, **silent)


@flow(name="lifecycle", on_cancellation=[replay_tracking], on_crashed=[replay_tracking])
def lifecycle(settings: Settings = Settings(), root: str = "") -> dict[str, StageResult]:  # noqa: B008
    """Bring the pipeline of this checkout up to date; returns the result per stage. Fails with the first stage that fails.

    Args:
        settings: How to run it.
        root: The checkout; empty: that of this flow.
    """
    log, folder = logger(), Path(root or ROOT)
    with run_lock(folder, log):
        return run_all(folder, settings, log)


def run_all(root: Path, settings: Settings, log: Echo) -> dict[str, StageResult]:
    identity = str(runtime.flow_run.id)
    environment = run_environment(identity, str(runtime.flow_run.name))
    if (root / "stages" / "params.py").exists():
        check_params(str(root))
    refresh_packages(root, environment, log)
    on_gpu, children, needs = gpu_stages(root), ChildProcesses(), up_to(settings.until, root)
    futures: dict[str, PrefectFuture] = {}

    def start(item: str) -> PrefectFuture:
        futures[item] = stage.with_options(
            name=item, task_run_name=item, retries=settings.retries, retry_delay_seconds=settings.retry_delay_s
        ).submit(
            *(item, str(root), environment, item.split("@")[0] in on_gpu, children),
            wait_for=[futures[other] for other in needs[item]],
        )
        return futures[item]

    exclusive = {item for item in needs if item.split("@")[0] in on_gpu}
    with children:
        done = run_graph(needs, start, settings.jobs or concurrent_stages(root), exclusive)
    for item, (result, _) in done.items():
        log(f"lifecycle: {item:<20} {result}")
    log_to_mlflow([result for result, _ in done.values()], root, environment, log)
    artifacts.show_run(root, identity, done)
    return {name: result for name, (result, _) in done.items()}


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.lifecycle", description="Bring the pipeline up to date as a Prefect flow."
    )
    parser.add_argument("--until", metavar="STAGE", choices=list(stage_graph(ROOT)), help="stop after this stage")
    parser.add_argument("--jobs", type=arguments.stages_at_once, metavar="N", help="concurrent stages")
    options = parser.parse_args()
    try:
        lifecycle(Settings(until=options.until, jobs=options.jobs))
    except StageFailedError as error:
        print(f"lifecycle: {error}", file=sys.stderr)
        return BAD_PARAMETERS if error.bad_parameters else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
