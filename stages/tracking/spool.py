"""Events of a stage on their way to the tracking server: one append-only JSONL file per stage run, below `.bellwether/tracking`.

The stage appends, a follower process sends. Files that a run attaches are copied into the folder `.files` beside it. What was
sent is kept in `.state`, so that a follower that is killed, or a server that was away, loses nothing and sends nothing twice;
what was sent completely is removed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_bytes, atomic_text

FOLDER = Path(".bellwether") / "tracking"
MAX_READ = 4_000_000
"""About how many bytes of events are taken from a file at a time; an event that is larger is taken by itself."""
HEADER = {
    **{"title": str, "pid": int, "t": int, "state": str, "lifecycle": str, "lifecycle_name": str},
    **{"tags": dict, "params": dict, "lifecycle_tags": dict, "lifecycle_params": dict},
}
"""What the first event must have (stages/tracking/header.py)."""


@dataclass
class Sent:
    """How far a spool file was sent."""

    run_id: str = ""
    offset: int = 0
    """Bytes of the file whose events the server has."""
    doubt: bool = False
    """A batch from `offset` on was begun and not confirmed: the server may have some of it."""
    again: int = 0
    """What lies before this byte may be on the server already: the record of how far the file was sent was damaged."""
    rejected: int = 0
    """Events the server refused for good (an artifact that is gone, a parameter logged twice with different values)."""
    error: str = ""
    """Why the last attempt failed; empty when it did not."""


def _said(line: bytes) -> dict[str, Any]:
    """The event of a whole line; of kind "torn" where a full disk cut it short or something else damaged it."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    whole = isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("t"), int)
    if whole and event["kind"] == "metric":
        whole = isinstance(event.get("name"), str) and isinstance(event.get("step"), int)
        whole = whole and isinstance(event.get("value"), (int, float))
    elif whole and event["kind"] in ("params", "tags"):
        values = event.get("values")
        whole = isinstance(values, dict) and all(isinstance(value, str) for value in values.values())
    return event if whole else {"kind": "torn"}


def _checked(state: Any, size: int) -> Sent:
    """The record `state` of a file of `size` bytes. Raises ValueError or TypeError where it makes no sense."""
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
    """One file of events, written by a stage and read by whoever sends it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_path = path.with_suffix(".state")
        self.files_path = path.with_suffix(".files")

    @classmethod
    def create(cls, root: Path, header: Mapping[str, Any]) -> Spool:
        """A new file that begins with `header`, named by time, process and the header's title, so that names sort by age. It is
        there under its name with its header or not at all: whoever looks after files that were left would take one without for
        that of a stage that died. Raises OSError if it cannot be made."""
        spool = cls(root / FOLDER / f"{time.time_ns():020d}-{os.getpid()}-{header['title']}.jsonl")
        atomic_bytes(spool.path, _line(header))
        return spool

    def append(self, event: Mapping[str, Any]) -> None:
        """Add one event. A single write to a file opened for appending is not torn apart by another writer's."""
        line = _line(event)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(handle)

    def files(self) -> Path:
        """A new folder for files that an event attaches."""
        self.files_path.mkdir(exist_ok=True)
        folder = self.files_path / f"{len(list(self.files_path.iterdir())):04d}"
        folder.mkdir()
        return folder

    def ended(self) -> bool:
        """Whether the last whole line is the end of the run."""
        with self.path.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - 4096))
            return b'"kind": "end"' in handle.read().rsplit(b"\n", 2)[-2:][0]

    def end_killed(self) -> None:
        """End the run of a stage that died, which may have left the last line unfinished."""
        with self.path.open("rb+") as handle:
            if handle.seek(0, os.SEEK_END):
                handle.seek(-1, os.SEEK_END)
                if handle.read() != b"\n":
                    handle.write(b"\n")
        self.append({"kind": "end", "status": "KILLED"})

    def read(self, offset: int) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """Whole events from byte `offset` on, each with its own offset, and the offset after the last of them.

        A line that a full disk cut short comes as an event of kind "torn".
        """
        with self.path.open("rb") as handle:
            handle.seek(offset)
            lines = handle.readlines(MAX_READ)
        events, position = [], offset
        for line in lines:
            if not line.endswith(b"\n"):
                break
            events.append((position, _said(line)))
            position += len(line)
        return events, position

    def header(self) -> dict[str, Any] | None:
        """The first event, which says what run this is; None if it is damaged or was cut short."""
        with self.path.open("rb") as handle:
            line = handle.readline()
        header = _said(line) if line.endswith(b"\n") else {"kind": "torn"}
        whole = header["kind"] == "run" and all(isinstance(header.get(name), kind) for name, kind in HEADER.items())
        return header if whole and "git.commit" in header["tags"] else None

    def set_aside(self) -> None:
        """Nothing says what run this is: keep the file under a name that nobody sends, or remove it if no event is in it."""
        if not self.read(0)[0]:
            self.remove()
            return
        kept = self.path.with_suffix(".damaged")
        os.replace(self.path, kept)
        print(f"tracking: the first line of {kept} is damaged, so it can't be sent; remove it, or mend it and call it .jsonl")

    def load_sent(self) -> Sent:
        """How far the file was sent. If that record is damaged, all of it is to be sent again: see `Sent.again`."""
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
        """Note why sending failed, for the stage to see."""
        sent = self.load_sent()
        sent.error = error
        self.save_sent(sent)

    def remove(self) -> None:
        shutil.rmtree(self.files_path, ignore_errors=True)
        for path in (self.path, self.state_path, self.path.with_suffix(".lock")):
            path.unlink(missing_ok=True)


def spools(root: Path) -> list[Spool]:
    """All files that are not completely sent, oldest first."""
    return [Spool(path) for path in sorted((root / FOLDER).glob("*.jsonl"))]
