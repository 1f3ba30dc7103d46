"""A flow run in MLflow: one parent run for all its stages, and a child with state and hashes for those DVC did not execute."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from flows.pipeline import StageResult
from flows.process import Echo, capture

TIMEOUT_S = 120


def arguments(results: Iterable[StageResult]) -> list[str]:
    """Arguments of `python -m stages.tracking`, such as `--state rl@search=restored`."""
    found: list[str] = []
    for result in results:
        for state, titles in (("ran", result.ran), ("restored", result.restored), ("unchanged", result.unchanged)):
            for title in titles:
                found += ["--state", f"{title}={state}"]
    return found


def run_environment(identity: str, name: str) -> dict[str, str]:
    """Environment variables that put stages under the parent run `lifecycle <name>` of flow run or experiment `identity`."""
    return {"LIFECYCLE_RUN_ID": identity, "LIFECYCLE_RUN_NAME": name}


def log_to_mlflow(results: Iterable[StageResult], root: Path, environment: Mapping[str, str], log: Echo) -> None:
    """Log the stages as children of the parent run that `environment` (run_environment) names. Errors are logged and fail
    nothing; what could not be sent is buffered and sent by the next stage."""
    states = arguments(results)
    if not states or not (root / "stages" / "tracking").is_dir():
        return
    command = [sys.executable, "-m", "stages.tracking", *states]
    try:
        done = capture(command, root, env={**os.environ, **environment}, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        log(f"MLflow: no answer within {TIMEOUT_S} s; the data is buffered and will be sent later")
        return
    for line in (done.stdout + done.stderr).splitlines():
        log(f"MLflow: {line}")
