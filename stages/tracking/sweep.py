"""What is done for stages that are gone: send what they left, and end runs that nobody will end any more."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from stages.runtime.files import locked
from stages.tracking.sender import Sender
from stages.tracking.server import Server, refused
from stages.tracking.spool import Spool, spools

SAME_MOMENT_MS = 1000


def alive(pid: int, started_ms: int) -> bool:
    """Whether process `pid` is the one that was running at `started_ms`, not a later one with its number."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() * 1000 <= started_ms + SAME_MOMENT_MS
    except psutil.NoSuchProcess:
        return False


def replay(root: Path, server: Server, at_most: int | None = None) -> int:
    """Send files that no follower is sending and whose stage is gone; returns how many were sent completely.

    A file that cannot be sent for reasons of its own is reported and keeps no other back. Raises what MLflow raises when the
    server does not answer.
    """
    done = 0
    for spool in spools(root):
        if at_most is not None and done >= at_most:
            break
        with locked(spool.path.with_suffix(".lock"), wait=False) as mine:
            if not mine or not spool.path.exists():
                continue
            try:
                done += _send_left(spool, server)
            except Exception as error:
                if not (refused(error) or isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError))):
                    raise
                print(f"tracking: {spool.path} can't be sent: {type(error).__name__}: {error}", flush=True)
    return done


def _send_left(spool: Spool, server: Server) -> bool:
    """Send `spool` if its stage is gone; whether it was sent completely."""
    header = spool.header()
    if header is None:
        spool.set_aside()
        return False
    if not spool.ended():
        if alive(header["pid"], header["t"]):
            return False
        spool.end_killed()
    return Sender(server, spool).send()


def _gone(tags: Mapping[str, str], root: Path, waiting: set[str], started_ms: int) -> bool:
    """Whether nobody will end a run: not its process, not the spool of its checkout."""
    checkout = Path(tags.get("checkout", ""))
    ours = checkout == root or not checkout.exists()
    return ours and "pid" in tags and tags.get("spool") not in waiting and not alive(int(tags["pid"]), started_ms)


def sweep(server: Server) -> list[str]:
    """End runs that stand as RUNNING though their process on this machine is gone and left no spool; returns their names.

    Runs of other machines and checkouts are left alone: what they still hold cannot be told from here.
    """
    now = time.time_ns() // 1_000_000
    waiting = {spool.path.stem for spool in spools(server.root)}
    ended: list[str] = []
    parents: set[str] = set()
    for run in server.running(socket.gethostname()):
        if "lifecycle" in run.data.tags:
            parents.add(run.info.run_id)
        elif _gone(run.data.tags, server.root, waiting, run.info.start_time):
            server.client.set_tag(run.info.run_id, "tracking.swept", "its process was gone and had left no word")
            server.client.set_terminated(run.info.run_id, "KILLED", end_time=now)
            ended.append(str(run.info.run_name))
    for parent in sorted(parents):
        server.settle(parent, now)
    return ended
