"""A training loop that can be watched and steered: it tells each step and its newest episodes, and pauses or stops between steps.

Nothing here changes what is computed: a paused loop waits, a stopped one has saved a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stages.records.episode import sample_schema, write_table
from stages.runtime.live import PAUSE, POLL_S, STOP, Live, StoppedError
from stages.runtime.spans import PAUSED, span

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext
    from stages.training.common.processes import Processes

NEWEST = 48
"""The most episodes of a step that are told."""


class Steering:
    """One loop's. Only the first process writes and reads files; all processes make the same calls."""

    def __init__(
        self, context: StageContext, processes: Processes | None, label: str, total: int, history: Sequence[Mapping[str, float]]
    ) -> None:
        self.context, self.processes = context, processes
        self.live = Live(context.root, context.title) if context.main and context.shard is None else None
        if self.live:
            self.live.begin(label, total, history)

    def tell(self, row: Mapping[str, float], newest: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """After a step: its row of the history, and its episodes (rows of `sample_schema`)."""
        if self.live is None:
            return
        self.live.step(row)
        file = self.live.episodes_file()
        if file is not None and (rows := newest()[:NEWEST]):
            with suppress(OSError):
                write_table(file, sample_schema(rows), rows, durable=False)

    def _wanted(self) -> tuple[str, str]:
        """The request that all processes see."""
        own = self.live.wanted() if self.live else ("", "")
        if self.processes is None or self.processes.count == 1:
            return own
        return self.processes.gather([own])[0]

    def obey(self, step: int, save: Callable[[], None]) -> None:
        """After step number `step`: wait while a pause is requested. Raises StoppedError, after `save`, if a stop is."""
        wanted, by = self._wanted()
        if not wanted:
            return
        paused = 0.0
        if wanted == PAUSE:
            save()
            self._note(f"paused after step {step} ({by})", "paused")
            started = time.monotonic()
            with span(PAUSED):
                while wanted == PAUSE:
                    time.sleep(POLL_S)
                    wanted, by = self._wanted()
            paused = time.monotonic() - started
            if self.live:
                self.context.metric("control/paused_s", paused, step)
        if wanted == STOP:
            save()
            self._note(f"stopped after step {step} ({by})", "stopped")
            raise StoppedError(f"stopped after step {step}, as requested ({by}); run the stage again to go on from there")
        self._note(f"went on after {paused:.0f} s ({by})" if paused else "", "running")

    def _note(self, text: str, phase: str) -> None:
        if self.live is None:
            return
        if text:
            print(f"{self.context.title}: {text}", flush=True)
            self.live.note(text, phase)
            self.context.tracker.tags({"control": "; ".join(self.live.state.notes)})
        else:
            self.live.forget()

    def finish(self) -> None:
        if self.live:
            self.live.end("finished")
