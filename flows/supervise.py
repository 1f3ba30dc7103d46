"""`python -m flows.supervise COMMAND...`: run a command so that nothing of it is left when this process goes.

DVC leaves a stage's processes running when it is killed, a Prefect worker its flow runs, and Prefect's ways to cancel a run do
not all reach what the run has started. Here the command and all its descendants, in whatever process group or session, are ended
when this process is told to end, and the kernel tells it so when its parent dies. While the command runs, processes that it
leaves behind become this one's children (Linux), so that none escapes.
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
"""Between asking the processes to end and making them."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


class _EndedError(Exception):
    """SIGTERM or SIGINT came."""


def _end(signum: int, frame: object) -> None:
    raise _EndedError(signum)


def _left(group: int) -> list[psutil.Process]:
    """Descendants of this process, and members of `group`, that are still at work."""
    found = psutil.Process().children(recursive=True)
    if sys.platform != "linux":  # elsewhere nobody is told of orphans, but those in the group are found
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
    """The child's exit code, 128 + its number if a signal ended it; orphans that came here and end meanwhile are let go."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_all(group: int, grace_s: float) -> None:
    """SIGTERM to each process once, SIGKILL to those that are left after `grace_s`; returns when none is."""
    deadline = time.monotonic() + grace_s
    told: set[int] = set()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _left(group)
        if not left:
            return
        late = time.monotonic() >= deadline
        for process in left:
            if late or process.pid not in told:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
                told.add(process.pid)
        time.sleep(0.05)


def run(command: list[str], grace_s: float = GRACE_S, sweep: bool = False) -> int:
    """Exit code of `command`; 128 + the signal's number if this process was told to end.

    What a command leaves that was killed is ended too; what is left by one that ends by itself, if `sweep` says so: a stage's
    follower still has to tell MLflow of the stage's end.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(_SET_CHILD_SUBREAPER, 1)
        library.prctl(_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return 128 + signal.SIGTERM
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    child = None
    try:
        child = subprocess.Popen(command, start_new_session=True)
        code = _wait(child)
        if sweep or child.returncode < 0:
            _end_all(child.pid, grace_s)
        return code
    except _EndedError as ended:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if child is not None:
            _end_all(child.pid, grace_s)
        return 128 + int(ended.args[0])


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.supervise", description="Run a command of which nothing is left.")
    parser.add_argument("--grace", type=float, default=GRACE_S, metavar="S", help="seconds before processes are made to end")
    parser.add_argument("--sweep", action="store_true", help="end what is left, too, when the command ends by itself")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("no command was given")
    return run(options.command, options.grace, options.sweep)


if __name__ == "__main__":
    sys.exit(main())
