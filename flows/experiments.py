"""Runs of the pipeline side by side as DVC experiments: one per setting and seed, each in a folder of its own.

`dvc exp run --temp` leaves this checkout alone: it works in a copy below .dvc/tmp, shares this checkout's cache, and stores the
results as an experiment, which `dvc exp show`, `apply` and `branch` take. Independent of Prefect and of the stages' work.
Not DVC's own queue (`dvc queue start`): its workers are detached processes, which cancelling a flow would not end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import psutil

from flows.overrides import FORCE, normalised
from flows.process import ChildProcesses, Echo, StageFailedError, python_environment, quoted, run_supervised
from flows.tracked import run_environment
from stages.runtime.git import GitError
from stages.runtime.git import git as run_git

RESULTS = "reports/evaluation.json"
RUN_FOLDERS, RUN_INFOS = Path(".dvc/tmp/exps/standalone"), Path(".dvc/tmp/exps/run")
"""Written by DVC: a folder per running experiment, and JSON files that map experiments to folders."""
GRACE_S, TIMEOUT_S = 3.0, 8.0
"""Time between SIGTERM and SIGKILL of an experiment's processes; longest wait for their end."""
TARGET = "evaluate"


def git(root: Path, *arguments: str) -> str:
    """Output of a git command. Raises StageFailedError."""
    try:
        return run_git(root, *arguments)
    except GitError as error:
        raise StageFailedError(str(error)) from error


def tree_state(root: Path) -> str:
    """16 hex digits over the commit and the uncommitted changes of tracked files, results excluded."""
    state = git(root, "rev-parse", "HEAD") + git(root, "diff", "HEAD", "--", ".", ":!reports", ":!dvc.lock")
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def experiment_name(label: str, overrides: Sequence[str], state: str) -> str:
    """`label` and a hash of overrides and tree: equal names mean equal runs."""
    digest = hashlib.sha256(json.dumps([list(overrides), state]).encode()).hexdigest()[:10]
    return f"{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}-{digest}"


def find(root: Path, name: str) -> str | None:
    """The git reference of experiment `name`; None if there is none."""
    listed = git(root, "for-each-ref", "--format=%(refname)", "refs/exps").split()
    return next((ref for ref in listed if ref.rsplit("/", 1)[-1] == name), None)


def commit_of(root: Path, name: str) -> str:
    """The commit of experiment `name`. Raises StageFailedError if there is no such experiment."""
    ref = find(root, name)
    if ref is None:
        raise StageFailedError(f"there is no experiment {name}")
    return git(root, "rev-parse", ref).strip()


def results(root: Path, name: str) -> dict[str, Any]:
    """reports/evaluation.json of an experiment. Raises StageFailedError if there is no such experiment."""
    return json.loads(git(root, "show", f"{commit_of(root, name)}:{RESULTS}"))


def output(root: Path, name: str, path: str) -> bytes:
    """A file among an experiment's cached outputs. Raises StageFailedError if there is no such experiment or file."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root), rev=commit_of(root, name)) as repo:
            return repo.dvcfs.read_bytes(path)
    except (OSError, DvcException) as error:
        raise StageFailedError(
            f"experiment {name} has no {path} in DVC's cache ({error}); 'dvc exp remove {name}' and run it again"
        ) from error


def run_folders(root: Path) -> set[Path]:
    """The folders in which DVC runs experiments of this checkout, or did when it was killed."""
    return {path for path in (root / RUN_FOLDERS).glob("tmp*") if path.is_dir()}


def remove_leftovers(root: Path, name: str) -> None:
    """Remove what DVC left of experiment `name`, which has ended: its run info and, if DVC was killed, its folder."""
    for found in glob("*/*.run", root_dir=root / RUN_INFOS):  # Path.glob fails if another run that ends removes its folder
        path = root / RUN_INFOS / found
        try:
            info = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # of another run, which is starting or ending
            continue
        if info.get("name") == name:
            shutil.rmtree(path.parent, ignore_errors=True)
            if Path(info["root_dir"]).parent == (root / RUN_FOLDERS).absolute():
                shutil.rmtree(info["root_dir"], ignore_errors=True)


def other_experiments_run(root: Path) -> bool:
    """Whether another DVC process runs an experiment in this checkout."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "exp" in (words := process.cmdline()) and "run" in words and Path(process.cwd()) == root.absolute():
                return True
    return False


@contextlib.contextmanager
def clean_up_on_error(root: Path, children: ChildProcesses) -> Iterator[None]:
    """On an exception, end the running experiments (`children`) and remove their folders, also those that DVC made so recently
    that they have no run info."""
    before = run_folders(root)
    try:
        yield
    except BaseException:
        children.terminate_and_wait(TIMEOUT_S)
        if not other_experiments_run(root):
            for folder in run_folders(root) - before:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def run_experiment(
    root: Path, name: str, overrides: Sequence[str], echo: Echo = print, children: ChildProcesses | None = None
) -> bool:
    """Run the pipeline up to `evaluate` with `overrides` ("rl.algorithm=rloo") of params.yaml, unless experiment `name` exists;
    whether it ran. Raises StageFailedError."""
    if find(root, name) is not None:
        echo(f"{name}: already done")
        return False
    settings = [argument for override in overrides for argument in ("-S", FORCE + normalised(override))]
    command = ["-m", "dvc", "--wait-for-lock", "exp", "run", "--temp", "--name", name, *settings, TARGET]
    # One parent run in MLflow per experiment.
    environment = python_environment(**run_environment(name, name))
    try:
        code, tail = run_supervised(command, root, environment, lambda line: echo(f"{name}: {line}"), children, GRACE_S)
    finally:
        remove_leftovers(root, name)
    if code or find(root, name) is None:
        raise StageFailedError(f"experiment {name} failed (exit code {code}). Its last output:{quoted(tail)}")
    return True
