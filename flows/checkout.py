"""One run per checkout at a time: a lock that the kernel releases when its holder ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(".bellwether") / "run.lock"
POLL_S = 0.5


@contextmanager
def run_lock(root: Path, log: Callable[[str], None] = print, lock: Path = LOCK) -> Iterator[None]:
    """Hold the lock file `lock` of a checkout; while another process holds it, log once which, and wait."""
    path = root / lock
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as handle:
        logged = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not logged:
                    handle.seek(0)
                    log(f"{root} is locked by another run (process {handle.read().strip() or 'unknown'}); waiting for it to end")
                    logged = True
                time.sleep(POLL_S)
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield
