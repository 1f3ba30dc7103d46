"""Copies of the checkout in which ordinary stages run with settings of their own: runs of claims, evaluations of designs.

A workspace appears under its name only when it is complete, and loses the name before it is removed. So a run that was killed
resumes in a complete workspace or starts in a new one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stages.runtime.files import atomic_text
from stages.runtime.preloaded import Preloaded, PreloadedError

PARAMS = "params.yaml"
LOG = "run.log"
TAIL = 2000
"""Characters of a failed command's output that its error quotes."""
DVC_CONFIG = """[core]
    no_scm = true
    analytics = false
    check_update = false
[cache]
    dir = {cache}
"""
_NO_CACHES = shutil.ignore_patterns("__pycache__")


class RunFailedError(RuntimeError):
    """A command failed in a workspace, or left no result; the message quotes the end of its output."""


def environment(threads: int) -> dict[str, str]:
    """Environment variables of the stages: none of an enclosing DVC or lifecycle run, and tracking only if it is switched on."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "LIFECYCLE_", "MLFLOW_RUN"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), outer.get("PATH", "")])
    return {"BELLWETHER_TRACKING": "off", **outer, "PATH": path, "OMP_NUM_THREADS": str(threads)}


def _link(source: str, target: str) -> None:
    """A hard link, or a copy across file systems; an existing target stays. Safe, since stages replace files and never edit
    them."""
    if os.path.exists(target):
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def link_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _contents(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@dataclass(frozen=True)
class EvaluationWorkspace:
    """A copy of the checkout in `folder`."""

    folder: Path

    def create(self, fill: Callable[[EvaluationWorkspace], None]) -> None:
        """Let `fill` make the workspace under another name, and rename it; nothing if it exists."""
        if not self.folder.exists():
            unfinished = EvaluationWorkspace(self.folder.with_name(f"{self.folder.name}.partial"))
            shutil.rmtree(unfinished.folder, ignore_errors=True)
            fill(unfinished)
            unfinished.folder.rename(self.folder)

    def remove(self) -> None:
        """Delete the workspace if it exists, and what a kill halfway through an earlier removal left; nothing is left under its
        name."""
        done = self.folder.with_name(f"{self.folder.name}.done")
        shutil.rmtree(done, ignore_errors=True)
        if self.folder.exists():
            shutil.rmtree(self.folder.rename(done))

    def check_out(self, root: Path, commit: str, paths: Sequence[str]) -> None:
        """Fill it with `paths` of a commit of the repository `root`, as a DVC project that shares the repository's cache."""
        self.folder.mkdir(parents=True)
        with subprocess.Popen(["git", "archive", commit, "--", *paths], cwd=root, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", str(self.folder)], stdin=archive.stdout, check=True)
        if archive.returncode:
            raise RunFailedError(f"git archive of {commit} failed")
        atomic_text(self.folder / ".dvc" / "config", DVC_CONFIG.format(cache=root / ".dvc" / "cache"))

    def copy_of(self, other: EvaluationWorkspace) -> None:
        """Symbolic links, such as that to a large base model, stay links."""
        shutil.copytree(other.folder, self.folder, symlinks=True)

    def update_code(self, root: Path) -> None:
        """Copy stages/ and dvc.yaml from the checkout `root` if they differ: older code could reject a newer params.yaml."""
        stages = self.folder / "stages"
        if _contents(stages) != _contents(root / "stages"):
            shutil.rmtree(stages, ignore_errors=True)
            shutil.copytree(root / "stages", stages, ignore=_NO_CACHES)
        shutil.copy2(root / "dvc.yaml", self.folder / "dvc.yaml")

    def write_settings(self, values: Mapping[str, Any], name: str = PARAMS) -> None:
        """Write `values` as YAML; params.yaml is written without the design search's section, which is no part of it."""
        written = {key: value for key, value in values.items() if name != PARAMS or key != "design"}
        atomic_text(self.folder / name, yaml.safe_dump(written, sort_keys=False))

    def python(self, arguments: Sequence[str], threads: int) -> float:
        """Run Python with `arguments` in the workspace; its output goes to LOG. Returns the processor seconds that it and its
        children took: unlike the clock's, other programs do not lengthen them. Raises RunFailedError."""
        path = self.folder / LOG
        with path.open("a", encoding="utf-8") as log:
            child = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.folder, env=environment(threads), stdout=log, stderr=subprocess.STDOUT
            )
            try:
                _, status, usage = os.wait4(child.pid, 0)
            except BaseException:
                child.kill()
                child.wait()
                raise
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise self._failure(" ".join(arguments[2:] if arguments[0] == "-c" else arguments), child.returncode)
        return usage.ru_utime + usage.ru_stime

    def run(self, programs: Sequence[Sequence[str]], process: Preloaded) -> float:
        """Run programs of the workspace (a module and its arguments each) one after another in a fork of `process`; otherwise as
        `python`."""
        command = "; ".join(map(" ".join, programs))
        try:
            code, seconds = process.run(self.folder, programs, self.folder / LOG)
        except PreloadedError as error:
            raise RunFailedError(f"'{command}' in {self.folder} failed: {error}") from error
        if code:
            raise self._failure(command, code)
        return seconds

    def _failure(self, command: str, code: int) -> RunFailedError:
        tail = (self.folder / LOG).read_text(encoding="utf-8", errors="replace")[-TAIL:]
        return RunFailedError(f"'{command}' in {self.folder} failed (exit code {code}):\n{tail}")
