"""One run per checkout at a time, whoever starts it: a lock that the kernel gives back when its holder is gone."""

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
def only_run(root: Path, say: Callable[[str], None] = print, lock: Path = LOCK) -> Iterator[None]:
    """Hold the checkout, or what else of it `lock` stands for. While another holds it, wait, after saying once who that is."""
    path = root / lock
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as handle:
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    handle.seek(0)
                    say(f"another run is at work in {root} (process {handle.read().strip() or 'unknown'}); waiting for its end")
                    told = True
                time.sleep(POLL_S)
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield
