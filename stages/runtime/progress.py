"""Progress of long work: a bar on a terminal, plain lines elsewhere, and a file for other processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.runtime.files import atomic_text

PLAIN_EVERY_S = 10.0
FILE_EVERY_S = 1.0
FOLDER = Path(".bellwether") / "progress"
"""Below the project's root; one JSON file per running stage."""


class Progress:
    """Prints a line every few seconds and one at the end. `origin`: where restored units come from, for people."""

    def __init__(self, label: str, total: int, unit: str, file: Path | None = None, origin: str = "from a checkpoint") -> None:
        self.label, self.total, self.unit, self.file, self.origin = label, total, unit, file, origin
        self.done = self.restored = 0
        self.started = self.printed = time.monotonic()
        self.written = float("-inf")
        self._write()

    @property
    def rate(self) -> float:
        """Units per second, without those from a checkpoint."""
        return (self.done - self.restored) / max(time.monotonic() - self.started, 1e-9)

    def advance(self, count: int = 1, note: str = "") -> None:
        """Add `count` finished units; `note` (a loss, a success rate) is shown next to the rate."""
        self.done += count
        self._show(count, note)
        self._write()

    def restore(self, count: int) -> None:
        """Add `count` units from a checkpoint."""
        self.done += count
        self.restored += count
        self._show(count, self.origin if count else "")
        self._write()

    def _write(self) -> None:
        """Write {"label", "done", "total", "unit"} to the file, at most once a second; ignores errors such as a full disk."""
        now = time.monotonic()
        if self.file is None or now - self.written < FILE_EVERY_S:
            return
        self.written = now
        with suppress(OSError):
            state = {"label": self.label, "done": self.done, "total": self.total, "unit": self.unit}
            atomic_text(self.file, json.dumps(state), durable=False)

    def close(self) -> None:
        """Remove the file."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()

    def _show(self, count: int, note: str) -> None:
        now = time.monotonic()
        if now - self.printed < PLAIN_EVERY_S and self.done < self.total:
            return
        self.printed = now
        rate = self.rate
        speed = f", {rate:.3g} {self.unit}s/s, {max(self.total - self.done, 0) / rate:.0f} s left" if rate else ""
        print(f"{self.label} {self.done}/{self.total} {self.unit}s{speed}{'; ' + note if note else ''}", flush=True)


class _Bar(Progress):
    def __init__(self, label: str, total: int, unit: str, file: Path | None = None, origin: str = "from a checkpoint") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        super().__init__(label, total, unit, file, origin)
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.note = ""
        self.task = self.bar.add_task(label, total=total, note="", rate="")
        self.bar.start()

    def restore(self, count: int) -> None:
        super().restore(count)
        self.bar.reset(self.task, completed=self.done)  # estimate the time left from new units only

    def close(self) -> None:
        super().close()
        self.bar.stop()

    def _show(self, count: int, note: str) -> None:
        self.note = note or self.note
        self.bar.update(self.task, advance=count, rate=f"{self.rate:.3g} {self.unit}s/s", note=self.note)


class _Silent(Progress):
    def _show(self, count: int, note: str) -> None:
        return None


@contextmanager
def progress(
    label: str,
    total: int,
    unit: str = "step",
    file: Path | None = None,
    shown: bool = True,
    origin: str = "from a checkpoint",
) -> Iterator[Progress]:
    """Show progress on `total` units of work, and write it to `file` if given; `shown`: False if another process shows it;
    `origin`: see Progress."""
    kind = (_Bar if sys.stdout.isatty() else Progress) if shown else _Silent
    bar = kind(label, total, unit, file, origin)
    try:
        yield bar
    finally:
        bar.close()
