"""Runs of the pipeline beside each other as DVC experiments: one per setting and seed, each in a folder of its own.

`dvc exp run --temp` leaves this checkout alone: it works in a copy below .dvc/tmp and keeps what came of it as an experiment,
with this checkout's cache, so what two runs share is computed once. Knows nothing of Prefect or of the stages' work.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.pipeline import StageFailedError
from flows.tracked import run_environment

RESULTS = "reports/evaluation.json"
TARGET = "evaluate"


def git(root: Path, *arguments: str) -> str:
    """Output of a git command. Raises StageFailedError."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise StageFailedError(f"git {' '.join(arguments)} failed in {root}: {done.stderr.strip()}")
    return done.stdout


def tree_state(root: Path) -> str:
    """16 hex digits over the commit and what differs from it in tracked files, results left aside."""
    state = git(root, "rev-parse", "HEAD") + git(root, "diff", "HEAD", "--", ".", ":!reports", ":!dvc.lock")
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def experiment_name(label: str, overrides: Sequence[str], state: str) -> str:
    """A name that two runs share only if they are the same run: `label` and a hash of overrides and tree."""
    digest = hashlib.sha256(json.dumps([list(overrides), state]).encode()).hexdigest()[:10]
    return f"{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}-{digest}"


def find(root: Path, name: str) -> str | None:
    """The git reference of the experiment called `name`; None if there is none."""
    listed = git(root, "for-each-ref", "--format=%(refname)", "refs/exps").split()
    return next((ref for ref in listed if ref.rsplit("/", 1)[-1] == name), None)


def results(root: Path, name: str) -> dict[str, Any]:
    """reports/evaluation.json of an experiment. Raises StageFailedError if there is no such experiment."""
    ref = find(root, name)
    if ref is None:
        raise StageFailedError(f"there is no experiment {name}")
    return json.loads(git(root, "show", f"{ref}:{RESULTS}"))


def run_experiment(root: Path, name: str, overrides: Sequence[str], echo: Callable[[str], None] = print) -> bool:
    """Run the pipeline up to `evaluate` with `overrides` ("rl.algorithm=rloo") of params.yaml, unless experiment `name` is there;
    whether it ran. Raises StageFailedError."""
    if find(root, name) is not None:
        echo(f"{name}: is there already")
        return False
    settings = [argument for override in overrides for argument in ("-S", override)]
    command = [sys.executable, "-m", "flows.supervise", sys.executable, "-m", "dvc", "--wait-for-lock", "exp", "run", "--temp"]
    command += ["--name", name, *settings, TARGET]
    with subprocess.Popen(
        command, cwd=root, env=environment(name), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        said = []
        try:
            assert child.stdout is not None
            for line in child.stdout:
                said.append(line.rstrip("\n"))
                echo(f"{name}: {said[-1]}")
        except BaseException:
            child.terminate()
            raise
    if child.returncode or find(root, name) is None:
        tail = "".join(f"\n    {line}" for line in said[-12:])
        raise StageFailedError(f"experiment {name} failed (exit code {child.returncode}). It said:{tail}")
    return True


def environment(name: str) -> Mapping[str, str]:
    """One parent run in MLflow for each experiment."""
    source = Path(__file__).resolve().parent.parent
    python_path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path, **run_environment(name, name)}
