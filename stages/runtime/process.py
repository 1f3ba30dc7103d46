"""Processes: telling one from a later one with its id, and starting one that ends with what started it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def process_identity(pid: int) -> str:
    """Distinguishes a process from a later one with the same id; "" if it has ended. Does not change when the clock is set."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        import psutil  # there may be no /proc

        with suppress(psutil.Error):
            return repr(psutil.Process(pid).create_time())
        return ""


def supervised(command: list[str], *options: str) -> list[str]:
    """`command` under flows/supervise.py, for this process to start."""
    return [sys.executable, "-m", "flows.supervise", "--parent", str(os.getpid()), *options, *command]


def wait_supervised(command: list[str], timeout_s: float | None = None, **options: Any) -> int:
    """Run `command` under flows/supervise.py; its exit code. Raises TimeoutExpired.

    On an exception it is terminated. subprocess.run would kill its supervisor, which could then not end what it has started.
    """
    with subprocess.Popen(supervised(command), **options) as child:
        try:
            return child.wait(timeout_s)
        except BaseException:
            child.terminate()
            raise
