"""Cleans up after dead stages: sends their leftover events and ends their runs."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.runtime.files import locked
from stages.runtime.process import process_identity
from stages.tracking.sender import Sender
from stages.tracking.server import Server, permanent
from stages.tracking.spool import Spool, spools

SAME_MOMENT_MS = 1000


def alive(pid: int, started_ms: int, identity: str = "") -> bool:
    """Whether process `pid` was already running at `started_ms` (not a later process with the same PID) and still is. `identity`:
    its `process_identity` where that is known, since `started_ms` deceives if the clock was set since."""
    if identity:
        return process_identity(pid) == identity
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() * 1000 <= started_ms + SAME_MOMENT_MS
    except psutil.NoSuchProcess:
        return False


def writer_alive(header: Mapping[str, Any]) -> bool:
    """Whether the stage whose spool has this header still runs."""
    return alive(header["pid"], header["t"], str(header.get("process", "")))


def replay(root: Path, server: Server, at_most: int | None = None) -> int:
    """Send the spool files of dead stages that no follower is sending; returns how many were sent completely.

    A file that cannot be sent is reported and skipped. Raises what MLflow raises if the server is unreachable.
    """
    done = 0
    for spool in spools(root):
        if at_most is not None and done >= at_most:
            break
        with locked(spool.path.with_suffix(".lock"), wait=False) as acquired:
            if not acquired or not spool.path.exists():
                continue
            try:
                done += _send_leftover(spool, server)
            except Exception as error:
                if not (permanent(error) or isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError))):
                    raise
                print(f"tracking: cannot send {spool.path}: {type(error).__name__}: {error}", flush=True)
    return done


def _send_leftover(spool: Spool, server: Server) -> bool:
    """Send `spool` if its stage has exited; whether it was sent completely."""
    header = spool.header()
    if header is None:
        spool.set_aside()
        return False
    if not spool.ended():
        if writer_alive(header):
            return False
        spool.end_killed()
    return Sender(server, spool).send()


def _abandoned(tags: Mapping[str, str], root: Path, waiting: set[str], started_ms: int) -> bool:
    """Whether neither the run's process nor a spool file of its checkout will end it."""
    checkout = Path(tags.get("checkout", ""))
    ours = checkout == root or not checkout.exists()
    return ours and "pid" in tags and tags.get("spool") not in waiting and not alive(int(tags["pid"]), started_ms)


def sweep(server: Server) -> list[str]:
    """End runs of this machine that are RUNNING although their process has exited without a spool file; returns their names.

    Runs of other machines and checkouts are left alone: they may still have unsent events.
    """
    now = time.time_ns() // 1_000_000
    waiting = {spool.path.stem for spool in spools(server.root)}
    ended: list[str] = []
    parents: set[str] = set()
    for run in server.running(socket.gethostname()):
        if "lifecycle" in run.data.tags:
            parents.add(run.info.run_id)
        elif _abandoned(run.data.tags, server.root, waiting, run.info.start_time):
            server.client.set_tag(run.info.run_id, "tracking.swept", "process exited without ending its run")
            server.client.set_terminated(run.info.run_id, "KILLED", end_time=now)
            ended.append(str(run.info.run_name))
    for parent in sorted(parents):
        server.update_status(parent, now)
    return ended
