"""A flow run in MLflow: one parent run for all its stages, and a child with state and hashes for those DVC did not execute."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flows.pipeline import Done

PATIENCE_S = 120


def arguments(done: Iterable[Done]) -> list[str]:
    """`--state rl@search=restored` and so on, for `python -m stages.tracking`."""
    found: list[str] = []
    for result in done:
        for state, titles in (("ran", result.ran), ("restored", result.restored), ("unchanged", result.unchanged)):
            for title in titles:
                found += ["--state", f"{title}={state}"]
    return found


def run_environment(identity: str, name: str) -> dict[str, str]:
    """What puts stages under the parent run of flow run or experiment `identity`, in MLflow `lifecycle <name>`."""
    return {"LIFECYCLE_RUN_ID": identity, "LIFECYCLE_RUN_NAME": name}


def tell_mlflow(done: Iterable[Done], root: Path, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """The children belong to the parent that `environment` (run_environment) names. What goes wrong is said and fails nothing:
    what could not be sent is kept and sent by the next stage."""
    states = arguments(done)
    if not states or not (root / "stages" / "tracking").is_dir():
        return
    command = [sys.executable, "-m", "stages.tracking", *states]
    try:
        told = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        say("MLflow: slow to answer; what it misses is kept and sent later")
        return
    for line in (told.stdout + told.stderr).splitlines():
        say(f"MLflow: {line}")
