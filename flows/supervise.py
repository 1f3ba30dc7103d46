"""`python -m flows.supervise COMMAND...`: run a command so that none of its processes outlives this one.

A killed DVC leaves a stage's processes running, a killed Prefect worker its flow runs, and cancelling a run in Prefect does not
always reach its subprocesses. Here the command and all its descendants, in any process group or session, are ended when this
process receives SIGTERM, SIGINT or SIGHUP (a closed terminal); the kernel sends SIGTERM when the parent dies. Orphans of the
command become children of this process (Linux), so that none escapes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

from stages.runtime.command import command

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _EndedError(Exception):
    """One of _SIGNALS was received."""


def _end(signum: int, frame: object) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # another one must not interrupt what ends the processes
    raise _EndedError(signum)


def _running(group: int | None) -> list[psutil.Process]:
    """Running descendants of this process and members of `group`, if that is known."""
    found = psutil.Process().children(recursive=True)
    if group is not None and sys.platform != "linux":  # no subreaper: find orphans by their group
        known = {process.pid for process in found}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.pid not in known and os.getpgid(process.pid) == group:
                    found.append(process)
    working = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                working.append(process)
    return working


def _wait(child: subprocess.Popen) -> int:
    """The child's exit code, 128 + the number of the signal that ended it; reaps adopted orphans meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_all(group: int | None, grace_s: float) -> None:
    """Send SIGTERM once to each process, SIGKILL after `grace_s`; returns when none is running."""
    deadline = time.monotonic() + grace_s
    signalled: set[int] = set()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        running = _running(group)
        if not running:
            return
        late = time.monotonic() >= deadline
        for process in running:
            if late or process.pid not in signalled:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
                signalled.add(process.pid)
        time.sleep(0.05)


def run(command: list[str], grace_s: float = GRACE_S, sweep: bool = False, parent: int | None = None) -> int:
    """Exit code of `command`; 128 + the signal's number if this process was signalled.

    Processes left by a killed command are ended; those left by a command that exited only with `sweep`, since the follower of a
    stage still has to log its end to MLflow. `parent`: the process that started this one; if it has died, nothing is started.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(_SET_CHILD_SUBREAPER, 1)
        library.prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked to tell
        return 128 + signal.SIGTERM
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _end)
    child = None
    try:
        child = subprocess.Popen(command, start_new_session=True)
        code = _wait(child)
        if sweep or child.returncode < 0:
            _end_all(child.pid, grace_s)
        return code
    except _EndedError as ended:
        _end_all(child.pid if child else None, grace_s)  # the signal may have come while Popen waited for a started child
        return 128 + int(ended.args[0])


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.supervise", description="Run a command and end its processes with it.")
    parser.add_argument("--grace", type=float, default=GRACE_S, metavar="S", help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--sweep", action="store_true", help="also end processes left by a command that exits by itself")
    parser.add_argument("--parent", type=int, metavar="PID", help="the starting process: if it has died, nothing is started")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("a command is required")
    return run(options.command, options.grace, options.sweep, options.parent)


if __name__ == "__main__":
    sys.exit(main())
