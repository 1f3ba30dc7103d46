"""Sends spooled events to MLflow.

Delivery is exactly once: metric points, parameters, tags and files are idempotent on the server; runs, traces and model
versions are looked up by a unique tag before they are created whenever an earlier attempt may have succeeded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.tracking.registry import register
from stages.tracking.server import MAX_POINTS, Server, permanent
from stages.tracking.spool import CORRUPT, Spool
from stages.tracking.traces import log_trace

BATCHED = ("metric", "params", "tags", CORRUPT)


class Sender:
    """Sends one spool file; the caller holds the file's lock."""

    def __init__(self, server: Server, spool: Spool) -> None:
        self.server, self.spool = server, spool
        self.sent = spool.load_sent()
        if self.sent.again and not self.sent.offset:
            print(f"{spool.state_path} is corrupt: resending everything the server does not have yet", flush=True)

    def send(self) -> bool:
        """Send all complete events. True if the last one ends the run (the file is then removed).

        Raises what MLflow raises if the server is unreachable; confirmed progress is kept.
        """
        while True:
            events, after = self.spool.read(self.sent.offset)
            if not events:
                return False
            if not self.sent.run_id:
                if not self._begin():
                    return True
                self._confirm(events[1][0] if len(events) > 1 else after)
                continue
            if self._send_events(events, after):
                self.spool.remove()
                return True

    def _begin(self) -> bool:
        """Create or find the run; False if there is nothing to send (the file is then removed)."""
        header = self.spool.header()
        if header is None:
            self.spool.set_aside()
            return False
        run_id = self.server.stage_run(self.spool.path.stem, header)
        if run_id is None:
            self.spool.remove()
            return False
        self.sent.run_id = run_id
        self.sent.rejected += self.server.batch(run_id, params=list(header["params"].items()))
        return True

    def _send_events(self, events: list[tuple[int, dict[str, Any]]], after: int) -> bool:
        """Send metric points, parameters and tags in batches and other events singly; True when the run has ended."""
        waiting: list[dict[str, Any]] = []
        for index, (_, event) in enumerate(events):
            following = events[index + 1][0] if index + 1 < len(events) else after
            if event["kind"] in BATCHED:
                waiting.append(event)
                if len(waiting) < MAX_POINTS and index + 1 < len(events):
                    continue
            self._flush(waiting)
            if event["kind"] not in BATCHED:
                self._one(event, events[index][0])
            waiting = []
            if event["kind"] == "end":
                return True  # not confirmed: the next sender repeats it if this one is killed before it removes the file
            self._confirm(following)
        return False

    def _flush(self, events: list[dict[str, Any]]) -> None:
        points = [(event["name"], event["value"], event["t"], event["step"]) for event in events if event["kind"] == "metric"]
        params = [pair for event in events if event["kind"] == "params" for pair in event["values"].items()]
        tags = {key: value for event in events if event["kind"] == "tags" for key, value in event["values"].items()}
        self.sent.rejected += self.server.batch(self.sent.run_id, points, params, list(tags.items()))
        self.sent.rejected += sum(event["kind"] == CORRUPT for event in events)

    def _one(self, event: dict[str, Any], offset: int) -> None:
        """Send the event at `offset`. One that the server rejects is reported and skipped."""
        run_id, doubt, key = self.sent.run_id, self.sent.doubt or offset < self.sent.again, f"{self.spool.path.stem}:{offset}"
        self.sent.doubt = True
        self.spool.save_sent(self.sent)
        actions: dict[str, Callable[[], None]] = {
            "artifact": lambda: self._artifacts(event),
            "datasets": lambda: self.server.inputs(run_id, event),
            "headline": lambda: self.server.headline(run_id, event["values"], event["t"]),
            "trace": lambda: log_trace(self.server, run_id, event, key, doubt),
            "model": lambda: register(self.server, run_id, event, self.spool.files_path / event["files"]),
            "end": lambda: self._end(event),
        }
        try:
            actions[event["kind"]]()
        except Exception as error:
            if not permanent(error):
                raise
            print(f"rejected: {event['kind']}: {error}", flush=True)
            self.sent.rejected += 1

    def _artifacts(self, event: dict[str, Any]) -> None:
        folder: Path = self.spool.files_path / event["files"]
        for path in sorted(folder.iterdir()):
            self.server.artifact(self.sent.run_id, path)

    def _end(self, event: dict[str, Any]) -> None:
        if self.sent.rejected:
            self.server.batch(self.sent.run_id, tags=[("tracking.rejected", str(self.sent.rejected))])
        self.server.end(self.sent.run_id, event["status"], event["t"])

    def _confirm(self, offset: int) -> None:
        self.sent = replace(self.sent, offset=offset, doubt=False, error="")
        self.spool.save_sent(self.sent)
