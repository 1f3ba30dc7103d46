"""Tells MLflow of a flow run's stages that DVC did not have to execute: each gets a child run with its state and hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
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


def tell_mlflow(done: Iterable[Done], root: Path, identity: str, name: str, say: Callable[[str], None]) -> None:
    """The children belong to the parent of flow run `identity`, called `name`. What goes wrong is said and fails nothing: what
    could not be sent is kept and sent by the next stage."""
    states = arguments(done)
    if not states or not (root / "stages" / "tracking").is_dir():
        return
    environment = {**os.environ, "LIFECYCLE_RUN_ID": identity, "LIFECYCLE_RUN_NAME": name}
    command = [sys.executable, "-m", "stages.tracking", *states]
    try:
        told = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        say("MLflow: slow to answer; what it misses is kept and sent later")
        return
    for line in (told.stdout + told.stderr).splitlines():
        say(f"MLflow: {line}")
