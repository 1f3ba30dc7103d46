"""A process that ends with the one that started it (Linux): a killed `dvc repro` leaves no stage behind."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from pathlib import Path

SHELLS = frozenset({"sh", "dash", "bash", "zsh", "ksh", "fish"})


def die_with_parent() -> None:
    """Ask the kernel to end this process (SIGTERM) when its parent goes, or DVC does that started it by a shell.

    DVC runs a stage by `$SHELL -c`. bash puts the stage in its own place; dash, the /bin/sh of Debian, stays between the two and
    outlives DVC.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
    name, dvc = _name_and_parent(os.getppid())
    if "DVC_STAGE" in os.environ and name in SHELLS:
        threading.Thread(target=_end_with, args=(dvc,), name="end with DVC", daemon=True).start()


def _name_and_parent(process: int) -> tuple[str, int]:
    """What `process` is called, and its parent's process id; nothing and 0 if it is gone."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    before, _, after = stat.rpartition(")")  # the name in brackets may itself hold brackets
    return before.partition("(")[2], int(after.split()[1])


def _end_with(process: int) -> None:
    """Wait for the end of `process`, which costs nothing, then end this one."""
    try:
        handle = os.pidfd_open(process)
    except OSError:  # gone, or a kernel before 5.3
        return
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
