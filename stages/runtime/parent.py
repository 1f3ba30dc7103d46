"""Ends this process with its parent (Linux), so that a killed `dvc repro` leaves no stage behind."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import sys
import threading
from pathlib import Path

SHELLS = frozenset({"sh", "dash", "bash", "zsh", "ksh", "fish"})


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent ends, or when DVC ends that started it through a shell.

    DVC runs a stage with `$SHELL -c`. bash replaces itself with the stage; dash (Debian's /bin/sh) stays in between and outlives
    DVC.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
    name, dvc = _name_and_parent(os.getppid())
    if "DVC_STAGE" in os.environ and name in SHELLS:
        threading.Thread(target=_end_with, args=(dvc,), name="end with DVC", daemon=True).start()


def _name_and_parent(process: int) -> tuple[str, int]:
    """The name of `process` and its parent's id; "" and 0 if it has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    before, _, after = stat.rpartition(")")  # the name in brackets may itself hold brackets
    return before.partition("(")[2], int(after.split()[1])


def _end_with(process: int) -> None:
    """Wait until `process` ends, then end this one."""
    try:
        select.select([os.pidfd_open(process)], [], [])
    except OSError as error:
        if error.errno != errno.ESRCH:  # the kernel is older than 5.3; else it has ended already
            return
    os.kill(os.getpid(), signal.SIGTERM)
