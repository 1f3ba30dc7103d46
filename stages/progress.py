"""Progress of long work: a bar on a terminal, plain lines where it is not one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

PLAIN_EVERY_S = 10.0


class Progress(Protocol):
    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units are done; `note` (a loss, a success rate) is shown beside the rate."""
        ...


class _Plain:
    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.started = self.printed = time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        now = time.monotonic()
        if now - self.printed >= PLAIN_EVERY_S or self.done >= self.total:
            self.printed = now
            elapsed = max(now - self.started, 1e-9)
            rate = self.done / elapsed
            left = max(self.total - self.done, 0) / rate if rate else 0.0
            text = f"{self.label} {self.done}/{self.total} {self.unit}s, {rate:.3g} {self.unit}s/s, {left:.0f} s left"
            print(f"{text}{'; ' + note if note else ''}", flush=True)


class _Bar:
    def __init__(self, label: str, total: int, unit: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

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
        self.unit = unit
        self.done, self.note = 0, ""
        self.started = time.monotonic()
        self.task = self.bar.add_task(label, total=total, note="", rate="")
        self.bar.start()

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        rate = self.done / max(time.monotonic() - self.started, 1e-9)
        self.note = note or self.note
        self.bar.update(self.task, advance=count, rate=f"{rate:.3g} {self.unit}s/s", note=self.note)


@contextmanager
def progress(label: str, total: int, unit: str = "step") -> Iterator[Progress]:
    """Show `total` units of work as they are done."""
    if sys.stdout.isatty():
        bar = _Bar(label, total, unit)
        try:
            yield bar
        finally:
            bar.bar.stop()
    else:
        yield _Plain(label, total, unit)
