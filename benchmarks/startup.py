"""noop_repro_seconds, noop_lifecycle_seconds and stage_help_seconds: overhead of runs that do nothing, against fixed limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Options, Result, Sample
from screenshots.servers import HOST, free_port, serving
from stages.runtime.speed import STAGES

NOOP_LIMIT_S, LIFECYCLE_LIMIT_S, HELP_LIMIT_S = 1.5, 20.0, 1.0


class SkippedError(RuntimeError):
    """A scenario cannot be measured in this checkout, for the reason in the message."""


def environment(root: Path) -> dict[str, str]:
    """This process's environment without variables of a surrounding `dvc repro`, the interpreter's folder first on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DVC_") or name == "DVC_NO_ANALYTICS"}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": path, "PYTHONPATH": str(root), "DVC_NO_ANALYTICS": "1"}


def run(command: list[str], root: Path) -> tuple[Sample, str]:
    """One run of a command in `root`, and its output. Raises RuntimeError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter()
    done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=False)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-1000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(1.0, wall, cpu), done.stdout


def repeated(command: list[str], options: Options) -> list[Sample]:
    return [run(command, options.root)[0] for _ in range(options.warm_ups + options.times)][options.warm_ups :]


def dvc() -> str:
    return str(Path(sys.executable).parent / "dvc")


def need_finished(root: Path) -> None:
    """Raises SkippedError unless the lifecycle is up to date."""
    if not (root / ".dvc").is_dir():
        raise SkippedError("not a DVC checkout")
    if not (root / "data" / "models" / "merged").is_dir():
        raise SkippedError("the lifecycle has not been run in this checkout")
    stale = run([dvc(), "status", "dvc.yaml"], root)[1].strip()
    if "up to date" not in stale:
        raise SkippedError(f"the lifecycle is not up to date here; run 'make lifecycle' first: {stale[:200]}")


def noop_repro(options: Options) -> dict[str, Result]:
    """`dvc --wait-for-lock repro` without changes."""
    need_finished(options.root)
    samples = repeated([dvc(), "--wait-for-lock", "repro"], options)
    return {"noop_repro_seconds": Result("s", f"the limit of {NOOP_LIMIT_S:g} s", "limit", samples, limit=NOOP_LIMIT_S)}


@contextmanager
def prefect_server(options: Options) -> Iterator[dict[str, str]]:
    """Environment variables for clients of a Prefect server that runs during the block."""
    address = f"http://{HOST}:{(port := free_port())}"
    settings = {
        "PREFECT_HOME": str(options.scratch / "prefect"),
        "PREFECT_API_URL": f"{address}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    server = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    with serving(server, f"{address}/api/health", options.scratch / "prefect.log", settings, options.root):
        yield settings


def noop_lifecycle(options: Options) -> dict[str, Result]:
    """`python -m flows.lifecycle` without changes, with a running Prefect server and a separate MLflow store."""
    need_finished(options.root)
    tracking = {"MLFLOW_TRACKING_URI": f"sqlite:///{options.scratch / 'mlflow.db'}", "BELLWETHER_TRACKING": "on"}
    with prefect_server(options) as settings:
        variables = (f"{name}={value}" for name, value in {**settings, **tracking}.items())
        samples = repeated(["env", *variables, sys.executable, "-m", "flows.lifecycle"], options)
    limit = f"the limit of {LIFECYCLE_LIMIT_S:g} s"
    return {"noop_lifecycle_seconds": Result("s", limit, "limit", samples, limit=LIFECYCLE_LIMIT_S)}


def stage_help(options: Options) -> dict[str, Result]:
    """`python -m stages.X --help` of the slowest stage."""
    stages = STAGES[:1] if options.quick else STAGES
    samples = {name: repeated([sys.executable, "-m", f"stages.{name}", "--help"], options) for name in stages}
    medians = {name: sorted(sample.wall for sample in values)[len(values) // 2] for name, values in samples.items()}
    slowest = max(medians, key=lambda name: medians[name])
    notes = {"slowest": slowest, "seconds": {name: round(value, 3) for name, value in medians.items()}}
    result = Result("s", f"the limit of {HELP_LIMIT_S:g} s", "limit", samples[slowest], limit=HELP_LIMIT_S, notes=notes)
    return {"stage_help_seconds": result}
