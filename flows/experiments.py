"""Runs of the pipeline beside each other as DVC experiments: one per setting and seed, each in a folder of its own.

`dvc exp run --temp` leaves this checkout alone: it works in a copy below .dvc/tmp and keeps what came of it as an experiment,
with this checkout's cache, so what two runs share is computed once. Knows nothing of Prefect or of the stages' work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from flows.overrides import FORCE, normalised
from flows.pipeline import Children, StageFailedError
from flows.tracked import run_environment

RESULTS = "reports/evaluation.json"
RUNNING_IN, NOTES = Path(".dvc/tmp/exps/standalone"), Path(".dvc/tmp/exps/run")
"""DVC's own: a folder for each experiment at work, and JSON files that say which is whose."""
GRACE_S, END_WITHIN_S = 3.0, 8.0
"""Between asking an experiment's processes to end and making them; longest wait for that."""
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


def workplaces(root: Path) -> set[Path]:
    """The folders in which DVC runs experiments of this checkout, or did when it was killed."""
    return {path for path in (root / RUNNING_IN).glob("tmp*") if path.is_dir()}


def clear_up(root: Path, name: str) -> None:
    """Remove what DVC left of the run of experiment `name`, which has ended: its note and, if DVC was killed, its folder."""
    for note in (root / NOTES).glob("*/*.run"):
        try:
            told = json.loads(note.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # another run's, which has just begun or ended
            continue
        if told.get("name") == name:
            shutil.rmtree(note.parent, ignore_errors=True)
            if Path(told["root_dir"]).parent == (root / RUNNING_IN).absolute():
                shutil.rmtree(told["root_dir"], ignore_errors=True)


def others_at_work(root: Path) -> bool:
    """Whether DVC runs an experiment in this checkout."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "exp" in (words := process.cmdline()) and "run" in words and Path(process.cwd()) == root.absolute():
                return True
    return False


@contextlib.contextmanager
def left_tidy(root: Path, children: Children) -> Iterator[None]:
    """End the experiments that run (`children`) when the block is left by an exception, and remove the folders they worked in.

    Those have a note by then, but for a moment after they were made; then they are the new ones that nobody works in.
    """
    before = workplaces(root)
    try:
        yield
    except BaseException:
        children.end_and_wait(END_WITHIN_S)
        if not others_at_work(root):
            for folder in workplaces(root) - before:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def run_experiment(
    root: Path,
    name: str,
    overrides: Sequence[str],
    echo: Callable[[str], None] = print,
    children: Children | None = None,
) -> bool:
    """Run the pipeline up to `evaluate` with `overrides` ("rl.algorithm=rloo") of params.yaml, unless experiment `name` is there;
    whether it ran. Raises StageFailedError."""
    children = children or Children()
    if find(root, name) is not None:
        echo(f"{name}: is there already")
        return False
    settings = [argument for override in overrides for argument in ("-S", FORCE + normalised(override))]
    command = [sys.executable, "-m", "flows.supervise", "--grace", str(GRACE_S), sys.executable, "-m", "dvc", "--wait-for-lock"]
    command += ["exp", "run", "--temp", "--name", name, *settings, TARGET]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    said: list[str] = []
    try:
        with children.start(command, cwd=root, env=environment(name), **streams) as child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    said.append(line.rstrip("\n"))
                    echo(f"{name}: {said[-1]}")
            except BaseException:
                child.terminate()
                raise
        children.ended(child)
    finally:
        clear_up(root, name)
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
