"""Processes that flows start: with this checkout's code on their path, and ended together with all their descendants."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from stages.runtime.process import supervised

ROOT = Path(__file__).resolve().parent.parent
BAD_PARAMETERS = 2
"""Exit code of a stage that rejects its parameters or input: a retry cannot help."""
STOPPED = 3
"""Exit code of a stage that someone asked to stop after a step."""
TAIL_LINES = 12
"""Lines of a failed command's output that its error quotes."""
_NOISE = re.compile(r"^(Running stage '|> |ERROR: failed to reproduce '|\s*$)")
_TEXT: dict[str, Any] = {"text": True, "errors": "replace"}
Echo = Callable[[str], None]


class StageFailedError(RuntimeError):
    """A command failed. `code`: exit code of the stage's own command, None if it did not start."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code)

    @property
    def bad_parameters(self) -> bool:
        return self.code == BAD_PARAMETERS

    @property
    def stopped(self) -> bool:
        return self.code == STOPPED


class ChildProcesses:
    """The running processes of one flow, so that the thread that waits for them can end all of them.

    A block `with children` ends them if it is left by an exception other than a stage's failure: standard output was closed, or
    the run was cancelled.
    """

    def __init__(self) -> None:
        self._lock, self._running, self._closed = Lock(), set[subprocess.Popen](), False

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, StageFailedError):
            self.terminate()

    def start(self, command: list[str], **options: Any) -> subprocess.Popen:
        with self._lock:
            if self._closed:
                raise StageFailedError("the run was ended")
            child = subprocess.Popen(command, **options)
            self._running.add(child)
            return child

    def discard(self, child: subprocess.Popen) -> None:
        with self._lock:
            self._running.discard(child)

    def terminate(self) -> None:
        """Terminate all, and start no more."""
        with self._lock:
            self._closed = True
            for child in self._running:
                child.terminate()

    def terminate_and_wait(self, timeout_s: float) -> None:
        self.terminate()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            remaining = tuple(self._running)
        for child in remaining:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))


def python_environment(**variables: str) -> dict[str, str]:
    """This process's environment, with this interpreter and this checkout first on the paths, and `variables`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path, **variables}


def capture(command: list[str], root: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a short command in `root` and return its output."""
    return subprocess.run(command, cwd=root, capture_output=True, check=False, **_TEXT, **options)


def quoted(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines)


def run_supervised(
    command: list[str],
    root: Path,
    environment: Mapping[str, str],
    echo: Echo,
    children: ChildProcesses | None = None,
    grace_s: float | None = None,
) -> tuple[int, list[str]]:
    """Run Python with the arguments `command` under flows/supervise.py, echoing each line; its exit code and last lines.

    An exception here, such as a cancelled run, ends the command and its descendants.
    """
    children, tail = children or ChildProcesses(), deque[str](maxlen=TAIL_LINES)
    grace = [] if grace_s is None else ["--grace", str(grace_s)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **_TEXT}
    with children.start(supervised([sys.executable, *command], *grace), cwd=root, env=environment, **streams) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                line = line.rstrip("\n")
                if not _NOISE.match(line):
                    tail.append(line)
                echo(line)
        except BaseException:
            child.terminate()
            raise
    children.discard(child)
    return child.returncode, list(tail)
