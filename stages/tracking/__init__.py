"""MLflow tracking that can neither slow a stage down nor stop it.

The stage appends events to a spool file (spool.py) and never waits. A follower process (follower.py, a child of the stage)
sends them every few seconds through server.py, the only module that imports mlflow, so the UI is live. What a slow or
absent server missed stays in the spool; `python -m stages.tracking` sends it, and so does the next stage's follower.

Server: MLFLOW_TRACKING_URI, else the file mlflow.db in the project's root. BELLWETHER_TRACKING=off switches tracking off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stages.params import ROOT, Params
from stages.runtime.lineage import dvc_hash, tracked_files
from stages.runtime.tracker import Tracker
from stages.tracking.cached import note, tell_what_came_before
from stages.tracking.header import Lifecycle, flatten, git_state
from stages.tracking.spool import FOLDER, Spool, spools

__all__ = ["REGISTERED_MODEL", "SpoolTracker", "flatten", "git_state", "open_tracker", "tracking_is_off"]

CLOSE_WAIT_S = 1.5
"""Longest wait for the follower when a stage ends; after that it goes on by itself, for a minute at most."""
FOLLOWERS = 3
"""How many followers a stage starts, one after the other, should they be killed."""
REGISTERED_MODEL, MODEL_FILES, ROWS = "bellwether", "model", "rows.parquet"
"""Name of the registered model, and a version's files among its run's artifacts: their folder and the evaluation rows in it."""


def datasets(root: Path, hashes: Mapping[str, str]) -> list[dict[str, Any]]:
    """What MLflow shows as a run's datasets: name, DVC hash, and a profile of number and size of files and rows of tables."""
    found = []
    for path, digest in hashes.items():
        folder = root / path
        if not path.startswith("data/") or path.startswith(("data/models", "data/base")) or not folder.exists():
            continue
        files = tracked_files(folder) if folder.is_dir() else [folder]
        profile: dict[str, int] = {"files": len(files), "bytes": sum(item.stat().st_size for item in files)}
        tables = [item for item in files if item.suffix == ".parquet"]
        if tables:
            import pyarrow.parquet as pq

            with suppress(ValueError):  # a damaged table is the stage's to complain of
                profile.update({f"rows of {item.stem}": pq.read_metadata(item).num_rows for item in tables[:20]})
        found.append({"name": path, "digest": digest, "profile": profile})
    return found


class SpoolTracker(Tracker):
    """Writes events and keeps a follower running. An event that cannot be written (full disk) is reported once and let go."""

    def __init__(self, root: Path, spool: Spool, title: str, here: Path | None = None) -> None:
        self.root, self.spool, self.here = root, spool, here or root
        self.title = title
        self.broken = False
        self.spent_s = 0.0
        """Seconds of the stage's own time that went into tracking."""
        self.started = 0
        self.follower: subprocess.Popen[bytes] | None = None
        self._follow()

    def _follow(self) -> None:
        """Start a follower unless one runs."""
        if (self.follower is not None and self.follower.poll() is None) or self.started >= FOLLOWERS:
            return
        self.started += 1
        with (self.root / FOLDER / "follower.log").open("ab") as log:
            self.follower = subprocess.Popen(
                [sys.executable, "-m", "stages.tracking", "--follow", str(self.spool.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Count the time that passes here, and let nothing that goes wrong with files out."""
        before = time.monotonic()
        try:
            yield
        except OSError as error:
            self.broken = True
            print(f"tracking: cannot write {self.spool.path}: {error}; this run is not tracked further", file=sys.stderr)
        finally:
            self.spent_s += time.monotonic() - before

    def _event(self, event: dict[str, Any]) -> None:
        if self.broken:
            return
        with self._guarded():
            self.spool.append(event)
            if self.follower is not None:
                self._follow()

    def params(self, values: Mapping[str, Any]) -> None:
        self._event({"kind": "params", "values": {key: str(value) for key, value in flatten(values).items()}})

    def tags(self, values: Mapping[str, str]) -> None:
        self._event({"kind": "tags", "values": {key: str(value) for key, value in values.items()}})

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self._event({"kind": "metric", "name": name, "value": float(value), "step": int(step or 0)})

    def headline(self, values: Mapping[str, float]) -> None:
        self._event({"kind": "headline", "values": {name: float(value) for name, value in values.items()}})

    def inputs(self, hashes: Mapping[str, str]) -> None:
        self.tags({f"in:{path}": value for path, value in hashes.items()})
        found: list[dict[str, Any]] = []
        with self._guarded():
            found = datasets(self.here, hashes)
        self._event({"kind": "datasets", "context": self.title, "datasets": found})

    def outputs(self, hashes: Mapping[str, str]) -> None:
        self.tags({f"out:{path}": value for path, value in hashes.items()})

    def artifact(self, path: Path) -> None:
        self._keep({"kind": "artifact"}, [Path(path)])

    def _keep(self, event: dict[str, Any], paths: Sequence[Path]) -> None:
        """An event with files: copied, since the next run replaces them, perhaps before the server is back."""
        if self.broken:
            return
        before = time.monotonic()
        try:
            folder = self.spool.files()
            for path in paths:
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, folder / path.name)
        except OSError as error:
            print(f"tracking: cannot keep {', '.join(map(str, paths))} for MLflow: {error}; left out", file=sys.stderr)
            return
        finally:
            self.spent_s += time.monotonic() - before
        self._event({**event, "files": folder.name})

    def episodes(self, rows: Sequence[Mapping[str, Any]], label: str, count: int = 4) -> None:
        from stages.tracking.episodes import sample, trace_of

        for row in sample(rows, count):
            trace = trace_of(row)
            self._event({"kind": "trace", **trace, "tags": {**trace["tags"], "stage": self.title, "sample": label}})

    def register_model(self, folder: Path, rows: Path, settings: Mapping[str, Any]) -> None:
        from stages.tracking.pointer import write_pointer

        path, digest = os.path.relpath(folder, self.here), dvc_hash(folder)
        event = {"kind": "model", "name": REGISTERED_MODEL, "path": path, "md5": digest, "settings": dict(settings)}
        with tempfile.TemporaryDirectory() as scratch:
            files = Path(scratch) / MODEL_FILES
            write_pointer(files, folder, digest)
            shutil.copy2(rows, files / ROWS)
            self._keep(event, [files])

    def close(self, status: str) -> None:
        self.metric("tracking/stage_seconds", round(self.spent_s, 3))
        self._event({"kind": "end", "status": status})
        if self.follower is None or self.follower.stdin is None:
            return
        self.follower.stdin.close()
        started = time.monotonic()
        while self.spool.path.exists() and not self.spool.load_sent().error and time.monotonic() - started < CLOSE_WAIT_S:
            self._follow()
            time.sleep(0.02)
        self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        """On standard error, why the server lacks something; nothing where the follower is about to have sent it."""
        sent, alive = self.spool.load_sent(), self.follower is not None and self.follower.poll() is None
        if not self.spool.path.exists():
            return
        error = sent.error
        if alive and not sent.run_id and not error:
            # No answer yet, as at the end of any short stage. It is worth a word where earlier stages got none either.
            error = next((earlier for spool in spools(self.root) if (earlier := spool.load_sent().error)), "")
        if alive and not error:
            return
        print(
            f"tracking: not everything was sent ({error or 'see .bellwether/tracking/follower.log'}). It is kept in {FOLDER}; "
            f"the next stage sends it, or 'python -m stages.tracking'",
            file=sys.stderr,
        )


def tracking_is_off() -> bool:
    return os.environ.get("BELLWETHER_TRACKING", "").lower() in ("off", "0", "false", "no")


def open_tracker(root: Path, name: str, domain: str | None, params: Params) -> Tracker:
    """The tracker of one stage run. Tracking that cannot start is reported and left off: it never stops a stage."""
    if tracking_is_off():
        return Tracker()
    before = time.monotonic()
    # A DVC experiment may run in a folder of its own that is removed afterwards; DVC_ROOT is the checkout itself.
    home = Path(os.environ.get("DVC_ROOT", root)).absolute()
    lifecycle = Lifecycle.now(home, params)
    header = lifecycle.header(name, domain)
    try:
        if os.environ.get("DVC_STAGE"):  # by hand, what dvc.lock says need not be what is there
            tell_what_came_before(lifecycle, root, name, domain)
        note(lifecycle, header["title"])
        tracker = SpoolTracker(home, Spool.create(home, header), header["title"], root)
    except OSError as error:
        print(f"tracking: cannot start ({error}); this run is not tracked", file=sys.stderr)
        return Tracker()
    tracker.spent_s += time.monotonic() - before
    return tracker
