"""nodes_dask, nodes_ray: rollouts divided over two nodes, against half the time of one: the ratio is the efficiency.

A node is a process of the cluster with one core, and reaches the others by TCP on 127.0.0.1. The command is the one that
`dvc repro` starts with `resources.shards`, with a running Prefect server. The scenario fails if the stage does not write the
bytes that it writes without shards.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from benchmarks.measure import Options, Result, Sample
from benchmarks.startup import SkippedError, environment, need_finished, prefect_server, run
from benchmarks.workers import DOMAIN, make_checkout, stage_command
from screenshots.servers import HOST, free_port
from stages.runtime.lineage import output_hashes

NODES = 2
EDITS = {"rollout": {"tasks": 96, "attempts": 24}, "resources": {"workers": 1}}
"""Six times as many attempts as by default: who needs several machines has more to do than the start of a process."""
AGAINST = "half the time of one node"
RAY = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for _ in range(int(sys.argv[1]) - 1):
    cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
"""
"""Starts nodes, prints their address, ends them when its input ends."""


@contextmanager
def started(command: list[str], folder: Path, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    supervised = [sys.executable, "-m", "flows.supervise", "--sweep", *command]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
    process: subprocess.Popen[str] = subprocess.Popen(supervised, cwd=folder, env=environment(folder), **pipes)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def dask_cluster(folder: Path, nodes: int, log: IO[str]) -> Iterator[str]:
    """Address of a Dask scheduler with `nodes` workers of one thread."""
    address = f"tcp://{HOST}:{(port := free_port())}"
    dask = [sys.executable, "-m", "dask"]
    with ExitStack() as running:
        running.enter_context(started([*dask, "scheduler", "--host", HOST, "--port", str(port), "--no-dashboard"], folder, log))
        for _ in range(nodes):
            running.enter_context(started([*dask, "worker", address, "--nthreads", "1", "--no-dashboard"], folder, log))
        yield address


@contextmanager
def ray_cluster(folder: Path, nodes: int, log: IO[str]) -> Iterator[str]:
    """Address of a Ray cluster with `nodes` nodes of one core."""
    with started([sys.executable, "-c", RAY, str(nodes)], folder, log) as process:
        address = process.stdout.readline().strip() if process.stdout else ""
        if not address:
            raise RuntimeError(f"Ray did not start; see {log.name}")
        yield address


CLUSTERS: dict[str, Callable[[Path, int, IO[str]], AbstractContextManager[str]]] = {"dask": dask_cluster, "ray": ray_cluster}


def divided(folder: Path, runner: str, nodes: int, address: str) -> Sample:
    """One run of all shards, as many as nodes, without what earlier runs left."""
    shutil.rmtree(folder / ".bellwether", ignore_errors=True)
    flow = [sys.executable, "-m", "flows.shards", "rollout", "--domain", DOMAIN, "--shards", str(nodes)]
    return run([*flow, "--runner", runner, "--address", address], folder)[0]


def check(folder: Path, where: str, expected: dict[str, str]) -> None:
    """Let the stage take up the shards. Raises RuntimeError if it writes other bytes than `expected`."""
    run(stage_command("rollout", DOMAIN), folder)
    if output_hashes(folder, "rollout", DOMAIN) != expected:
        raise RuntimeError(f"{where} wrote other bytes than the stage alone")


def measure_runner(options: Options, folder: Path, runner: str, expected: dict[str, str]) -> Result:
    samples: dict[int, list[Sample]] = {1: [], NODES: []}
    with ExitStack() as running, (options.scratch / f"{runner}.log").open("w") as log:
        addresses = {nodes: running.enter_context(CLUSTERS[runner](folder, nodes, log)) for nodes in samples}
        for repeat in range(options.times):
            for nodes in sorted(samples, reverse=bool(repeat % 2)):
                samples[nodes].append(divided(folder, runner, nodes, addresses[nodes]))
                if repeat == 0:
                    check(folder, f"{nodes} shards on {runner}", expected)
    halves = [replace(sample, wall=sample.wall / NODES) for sample in samples[1]]
    return Result("s", AGAINST, "seconds", samples[NODES], halves, notes={"nodes": NODES, "budgets": EDITS})


def measure(options: Options) -> dict[str, Result]:
    need_finished(options.root)
    runners = [runner for runner in CLUSTERS if importlib.util.find_spec(f"prefect_{runner}")]
    if not runners:
        raise SkippedError("neither extra, `dask` nor `ray`, is installed: pip install -e .[dask,ray]")
    folder = make_checkout(options, options.scratch / "nodes", EDITS)
    run(stage_command("rollout", DOMAIN), folder)
    expected = output_hashes(folder, "rollout", DOMAIN)
    with prefect_server(options) as settings:
        os.environ.update(settings)
        return {f"nodes_{runner}": measure_runner(options, folder, runner, expected) for runner in runners}
