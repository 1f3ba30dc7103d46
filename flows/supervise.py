"""`python -m flows.supervise COMMAND...`: run a command so that nothing of it is left when this process goes.

DVC leaves a stage's processes running when it is killed, and Prefect's ways to cancel a run do not all reach them. Here the
command has a process group of its own, which is ended when this process is told to end, and the kernel tells it so when
its parent dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

GRACE_S = 5.0
"""Between asking the group to end and making it."""


class _EndedError(Exception):
    """SIGTERM or SIGINT came."""


def _end(signum: int, frame: object) -> None:
    raise _EndedError(signum)


def _end_group(child: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + GRACE_S
        while number == signal.SIGTERM and time.monotonic() < deadline:
            child.poll()
            try:
                os.killpg(child.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def run(command: list[str]) -> int:
    """Exit code of `command`; 128 + the signal's number if this process was told to end."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
        if os.getppid() != parent:
            return 128 + signal.SIGTERM
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    child = None
    try:
        child = subprocess.Popen(command, start_new_session=True)
        return child.wait()
    except _EndedError as ended:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if child is not None:
            _end_group(child)
        return 128 + int(ended.args[0])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m flows.supervise COMMAND...")
    sys.exit(run(sys.argv[1:]))
