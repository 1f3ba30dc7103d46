"""`python -m flows.bootstrap`: make on a Prefect server (PREFECT_API_URL) what the flows need there; safe to run again.

A work pool of processes with the queues that prefect.yaml names, each of one run at a time; the concurrency limit `gpu`, one; the
deployments of prefect.yaml. A limit that is there already is left as it is set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from flows.process import ROOT
from stages.runtime.command import command

LIMITS = {"gpu": 1}
"""Global concurrency limits."""
QUEUE_LIMITS = {"checkout": 1, "experiments": 1}
"""Runs of a queue at a time."""


def deployments(root: Path = ROOT) -> list[dict[str, Any]]:
    return yaml.safe_load((root / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]


def make_pools(client: SyncPrefectClient, root: Path = ROOT) -> None:
    """The work pools and queues that the deployments name."""
    for deployment in deployments(root):
        pool, queue = deployment["work_pool"]["name"], deployment["work_pool"]["work_queue_name"]
        try:
            client.read_work_pool(pool)
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
            print(f"bootstrap: work pool {pool} made")
        try:
            client.read_work_queue_by_name(queue, work_pool_name=pool)
        except ObjectNotFound:
            made = client.create_work_queue(queue, work_pool_name=pool)
            if queue in QUEUE_LIMITS:
                client.update_work_queue(made.id, concurrency_limit=QUEUE_LIMITS[queue])
            print(f"bootstrap: queue {queue} made, {QUEUE_LIMITS.get(queue, 'any number of')} runs at once")


def make_limits(client: SyncPrefectClient) -> None:
    for name, limit in LIMITS.items():
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))
            print(f"bootstrap: concurrency limit {name} made: {limit}")


def deploy(root: Path = ROOT) -> None:
    """Make or update all deployments of prefect.yaml. Raises CalledProcessError after showing what Prefect said."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()
    print(f"bootstrap: deployments {', '.join(item['name'] for item in deployments(root))}")


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.bootstrap", description="Make what the flows need on a Prefect server."
    )
    parser.parse_args()
    if not os.environ.get("PREFECT_API_URL"):
        print("bootstrap: set PREFECT_API_URL to the server's, e.g. http://127.0.0.1:4200/api", file=sys.stderr)
        return 2
    with get_client(sync_client=True) as client:
        make_pools(client)
        make_limits(client)
    try:
        deploy()
    except subprocess.CalledProcessError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
