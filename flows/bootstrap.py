"""`python -m flows.bootstrap`: create on a Prefect server (PREFECT_API_URL) what the flows need; safe to run again.

A process work pool with the queues of prefect.yaml, one run at a time each; the concurrency limit `gpu` of 1; the deployments of
prefect.yaml (by `prefect deploy`, which creates neither queue nor global limits). Existing limits are not changed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from flows.process import ROOT, capture, python_environment
from stages.runtime.command import command
from stages.runtime.yaml_files import read_yaml

LIMITS = {"gpu": 1}
"""Global concurrency limits."""
QUEUE_LIMITS = {"checkout": 1, "experiments": 1}
"""Concurrent runs per queue."""


def deployments(root: Path = ROOT) -> list[dict[str, Any]]:
    return read_yaml(root / "prefect.yaml")["deployments"]


def make_pools(client: SyncPrefectClient, root: Path = ROOT) -> None:
    """Create the work pools and queues of the deployments."""
    for deployment in deployments(root):
        pool, queue = deployment["work_pool"]["name"], deployment["work_pool"]["work_queue_name"]
        try:
            client.read_work_pool(pool)
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
            print(f"bootstrap: created work pool {pool}")
        try:
            client.read_work_queue_by_name(queue, work_pool_name=pool)
        except ObjectNotFound:
            created = client.create_work_queue(queue, work_pool_name=pool)
            if queue in QUEUE_LIMITS:
                client.update_work_queue(created.id, concurrency_limit=QUEUE_LIMITS[queue])
            print(f"bootstrap: created queue {queue}, concurrency limit {QUEUE_LIMITS.get(queue, 'none')}")


def make_limits(client: SyncPrefectClient) -> None:
    for name, limit in LIMITS.items():
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))
            print(f"bootstrap: created concurrency limit {name}: {limit}")


def deploy(root: Path = ROOT) -> int:
    """Create or update all deployments of prefect.yaml; the exit code of `prefect deploy`, whose output is shown if it failed."""
    done = capture([sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"], root, env=python_environment())
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        return 1
    print(f"bootstrap: deployments {', '.join(item['name'] for item in deployments(root))}")
    return 0


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.bootstrap", description="Create what the flows need on a Prefect server."
    )
    parser.parse_args()
    if not os.environ.get("PREFECT_API_URL"):
        print("bootstrap: set PREFECT_API_URL to the server's API, e.g. http://127.0.0.1:4200/api", file=sys.stderr)
        return 2
    with get_client(sync_client=True) as client:
        make_pools(client)
        make_limits(client)
    return deploy()


if __name__ == "__main__":
    sys.exit(main())
