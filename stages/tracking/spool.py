"""The spool: one append-only JSONL file of events per stage run, in `.bellwether/tracking`.

The stages append, a follower process sends. Attached files are copied into the folder `.files` beside it. The `.state` file
records what was sent, so a killed follower or an outage loses nothing and sends nothing twice. A completely sent file is removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_bytes, atomic_text, locked

FOLDER = Path(".bellwether") / "tracking"
MAX_READ = 4_000_000
"""Approximate bytes of events read at a time; a larger event is read alone."""
CORRUPT = "torn"
"""Kind of an event whose line is damaged or was cut short."""
HEADER = {
    **{"title": str, "pid": int, "t": int, "state": str, "lifecycle": str, "lifecycle_name": str},
    **{"tags": dict, "params": dict, "lifecycle_tags": dict, "lifecycle_params": dict},
}
"""Fields of the first event (stages/tracking/header.py)."""


@dataclass
class Sent:
    """Progress of sending a spool file."""

    run_id: str = ""
    offset: int = 0
    """Bytes confirmed by the server."""
    doubt: bool = False
    """Events from `offset` on were sent but not confirmed: the server may have some of them."""
    again: int = 0
    """Events before this byte may already be on the server: the `.state` file was corrupt."""
    rejected: int = 0
    """Events that the server rejected (a missing artifact, a parameter logged twice with different values)."""
    error: str = ""
    """Why the last attempt failed; empty if it succeeded."""


def _parse(line: bytes) -> dict[str, Any]:
    """The event of a complete line; kind CORRUPT if it is damaged."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    valid = isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("t"), int)
    if valid and event["kind"] == "metric":
        valid = isinstance(event.get("name"), str) and isinstance(event.get("step"), int)
        valid = valid and isinstance(event.get("value"), (int, float))
    elif valid and event["kind"] in ("params", "tags"):
        values = event.get("values")
        valid = isinstance(values, dict) and all(isinstance(value, str) for value in values.values())
    return event if valid else {"kind": CORRUPT}


def _checked(state: Any, size: int) -> Sent:
    """The content of the `.state` file of a spool of `size` bytes. Raises ValueError or TypeError if it is invalid."""
    sent = Sent(**state)
    for name, default in asdict(Sent()).items():
        if type(getattr(sent, name)) is not type(default):
            raise TypeError(name)
    if not 0 <= sent.offset <= size or (sent.offset and not sent.run_id):
        raise ValueError(sent.offset)
    return sent


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps({"t": time.time_ns() // 1_000_000, **event}).encode() + b"\n"


class Spool:
    """One file of events, written by a stage and read by a sender."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_path = path.with_suffix(".state")
        self.files_path = path.with_suffix(".files")

    @classmethod
    def create(cls, root: Path, header: Mapping[str, Any]) -> Spool:
        """A new file that begins with `header`; names (time, PID, title) sort by age. Created atomically, since a file without a
        header looks like that of a dead stage. Raises OSError."""
        spool = cls(root / FOLDER / f"{time.time_ns():020d}-{os.getpid()}-{header['title']}.jsonl")
        atomic_bytes(spool.path, _line(header))
        return spool

    def append(self, event: Mapping[str, Any]) -> None:
        """Add one event with a single O_APPEND write, which other writers cannot interleave."""
        line = _line(event)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(handle)

    def files(self) -> Path:
        """A new folder for the files that an event attaches."""
        self.files_path.mkdir(exist_ok=True)
        folder = self.files_path / f"{len(list(self.files_path.iterdir())):04d}"
        folder.mkdir()
        return folder

    def ended(self) -> bool:
        """Whether the last complete line ends the run."""
        with self.path.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - 4096))
            return b'"kind": "end"' in handle.read().rsplit(b"\n", 2)[-2:][0]

    def end_killed(self) -> None:
        """End the run of a dead stage, which may have left an incomplete last line."""
        with self.path.open("rb+") as handle:
            if handle.seek(0, os.SEEK_END):
                handle.seek(-1, os.SEEK_END)
                if handle.read() != b"\n":
                    handle.write(b"\n")
        self.append({"kind": "end", "status": "KILLED"})

    def read(self, offset: int) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """Complete events from byte `offset` on, each with its offset, and the offset after the last."""
        with self.path.open("rb") as handle:
            handle.seek(offset)
            lines = handle.readlines(MAX_READ)
        events, position = [], offset
        for line in lines:
            if not line.endswith(b"\n"):
                break
            events.append((position, _parse(line)))
            position += len(line)
        return events, position

    def header(self) -> dict[str, Any] | None:
        """The first event, which identifies the run; None if it is damaged."""
        with self.path.open("rb") as handle:
            line = handle.readline()
        header = _parse(line) if line.endswith(b"\n") else {"kind": CORRUPT}
        valid = header["kind"] == "run" and all(isinstance(header.get(name), kind) for name, kind in HEADER.items())
        return header if valid and "git.commit" in header["tags"] else None

    def set_aside(self) -> None:
        """Rename a file without a valid header to `.damaged`, which is never sent; remove it if it holds no event."""
        if not self.read(0)[0]:
            self.remove()
            return
        kept = self.path.with_suffix(".damaged")
        os.replace(self.path, kept)
        print(f"tracking: cannot send {kept}: its first line is damaged; delete it, or repair it and rename it to .jsonl")

    def load_sent(self) -> Sent:
        """Progress of sending. If the `.state` file is corrupt, everything is sent again: see `Sent.again`."""
        try:
            size = self.path.stat().st_size if self.path.exists() else 0
            return _checked(json.loads(self.state_path.read_bytes()), size)
        except FileNotFoundError:
            return Sent()
        except (OSError, ValueError, TypeError):
            return Sent(again=max(size, 1))

    def save_sent(self, sent: Sent) -> None:
        atomic_text(self.state_path, json.dumps(asdict(sent)))

    def save_error(self, error: str) -> None:
        """Record why sending failed, for the stage to report."""
        sent = self.load_sent()
        sent.error = error
        self.save_sent(sent)

    def remove(self) -> None:
        shutil.rmtree(self.files_path, ignore_errors=True)
        for path in (self.path, self.state_path, self.path.with_suffix(".lock")):
            path.unlink(missing_ok=True)


def server_key() -> str:
    """Names the tracking server of this process, 8 hex digits; "local" without MLFLOW_TRACKING_URI."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return hashlib.sha256(uri.encode()).hexdigest()[:8] if uri else "local"


def follower_lock(root: Path) -> Path:
    """Held by the follower of a checkout's runs that go to this process's server."""
    return root / FOLDER / f"follower-{server_key()}.lock"


def is_followed(root: Path) -> bool:
    """Whether a follower runs that sends this process's runs."""
    with locked(follower_lock(root), wait=False) as free:
        return not free


def spools(root: Path) -> list[Spool]:
    """All files not yet completely sent, oldest first."""
    return [Spool(path) for path in sorted((root / FOLDER).glob("*.jsonl"))]
