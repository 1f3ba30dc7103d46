"""The shards of one stage as tasks of a Prefect flow on a Dask or Ray cluster: `python -m flows.shards rollout --domain search
--shards 4 --runner dask`.

A task runs `python -m stages.<stage> --shard i/n` in the checkout, which the cluster's machines share; the stage's own run
(`dvc repro`) collects the shards. With `resources.shards` in params.yaml it starts this flow itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.states import State

from stages.runtime.command import command, whole_number
from stages.runtime.process import wait_supervised

RETRIES = 2
BAD_PARAMETERS = 2
"""Exit code of a stage that a retry cannot help."""


class ShardFailedError(RuntimeError):
    """A shard's process failed; its own output says why."""

    def __init__(self, command: str, code: int) -> None:
        super().__init__(command, code)
        self.code = code

    def __str__(self) -> str:
        return f"'{self.args[0]}' failed (exit code {self.code}); see the output of the machine that ran it"


def _can_be_retried(task: Any, run: Any, state: State) -> bool:
    """Whether to retry a failed shard: not if its parameters were rejected."""
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, ShardFailedError) and error.code == BAD_PARAMETERS)


@task(retries=RETRIES, retry_delay_seconds=5, retry_condition_fn=_can_be_retried)
def shard(stage: str, domain: str | None, index: int, count: int, root: str, per_machine: int) -> None:
    """Run shard `index` of `count`; `per_machine` of them share a machine."""
    command = [sys.executable, "-m", f"stages.{stage}", *(["--domain", domain] if domain else []), "--shard", f"{index}/{count}"]
    environment = {
        **os.environ,
        "LOCAL_WORLD_SIZE": str(per_machine),
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    if code := wait_supervised(command, cwd=root, env=environment):
        raise ShardFailedError(" ".join(command[1:]), code)


@flow(name="shards")
def shards(stage: str, domain: str | None, count: int, root: str, per_machine: int) -> None:
    """Run all shards of a stage. If one fails, the flow fails after all are done."""
    futures = [
        shard.with_options(name=f"{stage} {index}/{count}").submit(stage, domain, index, count, root, per_machine)
        for index in range(1, count + 1)
    ]
    for future in futures:
        future.wait()
    for future in futures:
        future.result()


def make_runner(runner: str, address: str | None, count: int) -> Any:
    """Prefect's task runner on the cluster at `address`, or on a local cluster of `count` processes for this flow. Raises
    ModuleNotFoundError, naming the extra to install."""
    try:
        if runner == "dask":
            from prefect_dask import DaskTaskRunner

            if address:
                return DaskTaskRunner(address=address)
            local = {"n_workers": count, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
            return DaskTaskRunner(cluster_kwargs=local)
        from prefect_ray import RayTaskRunner
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"runner {runner} needs the extra `{runner}`: pip install 'bellwether[{runner}]'") from error
    if address:
        return RayTaskRunner(address=address)
    return RayTaskRunner(init_kwargs={"num_cpus": count, "include_dashboard": False})


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.shards", description="Run a stage's shards on a Dask or Ray cluster.")
    parser.add_argument("stage", choices=["rollout", "annotate", "evaluate"])
    parser.add_argument("--domain", help="domain of rollout and annotate")
    parser.add_argument("--shards", type=whole_number(1), required=True, metavar="N")
    parser.add_argument("--runner", choices=["dask", "ray"], required=True)
    parser.add_argument("--address", help="the cluster's scheduler; default: a local cluster")
    options = parser.parse_args()
    per_machine = 1 if options.address else options.shards
    try:
        runner = make_runner(options.runner, options.address, options.shards)
        shards.with_options(task_runner=runner)(options.stage, options.domain, options.shards, str(Path.cwd()), per_machine)
    except (ModuleNotFoundError, ShardFailedError) as error:
        print(f"shards: {error}", file=sys.stderr)
        return BAD_PARAMETERS if isinstance(error, ModuleNotFoundError) or error.code == BAD_PARAMETERS else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
