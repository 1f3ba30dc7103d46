"""Programs as forks of a process that has imported the libraries, which takes seconds: for many short runs one after another."""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.runtime.stage import LIBRARIES
from stages.runtime.workers import import_for_good, quiet_environment

ROOT = Path(__file__).resolve().parents[2]


class PreloadedError(RuntimeError):
    """The process has ended."""


class Preloaded:
    """A process that has imported `libraries` and runs programs, one after another. It ends with this process."""

    def __init__(
        self, environment: dict[str, str], threads: int = 1, local_model: bool = True, libraries: Sequence[str] = LIBRARIES
    ) -> None:
        """`environment`: variables of the programs; `threads`, `local_model`: see `quiet_environment`."""
        given = json.dumps([threads, local_model, list(libraries)])
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()", given],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )

    def run(self, folder: Path, programs: Sequence[Sequence[str]], log: Path) -> tuple[int, float]:
        """Run programs (a module and its arguments each) in one process, with their modules and current folder in `folder`, until
        one fails. Their output is added to `log`. Returns the last exit code, below 0 for a signal, and the processor seconds of
        the programs and their children. Raises PreloadedError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps([str(folder.resolve()), programs, str(log.resolve())]) + "\n")
            stdin.flush()
            code, seconds = json.loads(stdout.readline())
        except (OSError, ValueError) as error:
            self.close()
            raise PreloadedError(f"the process that runs programs has ended (exit code {self._process.returncode})") from error
        return int(code), float(seconds)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process, and the program that it runs."""
        self._process.terminate()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):  # what was written to a process that has ended
                stream.close()
        self._process.wait()


def _end_with(orders: int) -> None:
    """End this process when the one that wrote the orders closes its end of the pipe, or ends."""
    select.select([orders], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def _become(orders: int, interrupted: Any, folder: str, programs: Sequence[Sequence[str]], log: str) -> None:
    """Run programs in this fork, with output, folder and modules of its own. `interrupted`: its handler of SIGINT."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, interrupted)
    threading.Thread(target=_end_with, args=(orders,), name="end with the caller", daemon=True).start()
    os.chdir(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "stages"]:
        del sys.modules[name]
    sys.path[0] = folder
    for program in programs:
        sys.argv = list(program)
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise


def serve() -> None:
    """Run what the lines on standard input say (see `Preloaded.run`); write a line with code and seconds after each."""
    threads, local_model, libraries = json.loads(sys.argv[1])
    orders, results = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a program that the caller waits for must not start after Ctrl-C
    quiet_environment(threads, local_model)
    import_for_good(libraries)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the program, and the caller this process
    with os.fdopen(orders, encoding="utf-8") as lines:
        for line in iter(lines.readline, ""):
            child = os.fork()
            if not child:
                os.close(results)  # else the caller would not see this process end before the program does
                _become(orders, interrupted, *json.loads(line))
                return
            _, status, usage = os.wait4(child, 0)
            done: Any = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]
            os.write(results, f"{json.dumps(done)}\n".encode())
