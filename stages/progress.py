"""Progress of long work: a bar on a terminal, plain lines where it is not one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PLAIN_EVERY_S = 10.0


class Progress:
    """Plain lines: one every few seconds, and one at the end."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self.restored = 0
        self.started = self.printed = time.monotonic()

    @property
    def rate(self) -> float:
        """Units per second since the work began; units from a checkpoint do not count."""
        return (self.done - self.restored) / max(time.monotonic() - self.started, 1e-9)

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units are done; `note` (a loss, a success rate) is shown beside the rate."""
        self.done += count
        self._show(count, note)

    def restore(self, count: int) -> None:
        """`count` units came from a checkpoint."""
        self.done += count
        self.restored += count
        self._show(count, "from a checkpoint" if count else "")

    def _show(self, count: int, note: str) -> None:
        now = time.monotonic()
        if now - self.printed < PLAIN_EVERY_S and self.done < self.total:
            return
        self.printed = now
        rate = self.rate
        speed = f", {rate:.3g} {self.unit}s/s, {max(self.total - self.done, 0) / rate:.0f} s left" if rate else ""
        print(f"{self.label} {self.done}/{self.total} {self.unit}s{speed}{'; ' + note if note else ''}", flush=True)


class _Bar(Progress):
    def __init__(self, label: str, total: int, unit: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        super().__init__(label, total, unit)
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
        self.bar.reset(self.task, completed=self.done)  # so that the time left is guessed from what comes now

    def _show(self, count: int, note: str) -> None:
        self.note = note or self.note
        self.bar.update(self.task, advance=count, rate=f"{self.rate:.3g} {self.unit}s/s", note=self.note)


class _Silent(Progress):
    def _show(self, count: int, note: str) -> None:
        return None


@contextmanager
def progress(label: str, total: int, unit: str = "step", shown: bool = True) -> Iterator[Progress]:
    """Show `total` units of work as they are done, unless another process shows the same."""
    if not shown:
        yield _Silent(label, total, unit)
    elif sys.stdout.isatty():
        bar = _Bar(label, total, unit)
        try:
            yield bar
        finally:
            bar.bar.stop()
    else:
        yield Progress(label, total, unit)
