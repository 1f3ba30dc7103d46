"""MLflow tracking that never blocks or fails a stage.

The stage appends events to a spool file (spool.py). A process beside the stages, the follower (follower.py), sends them every
few seconds through server.py, the only module that imports mlflow. The first stage starts it; it serves all that run meanwhile
or soon after. If the server is slow or unreachable, unsent events stay in the spool; `python -m stages.tracking` or the next
follower sends them.

Server: MLFLOW_TRACKING_URI, else mlflow.db in the project root. BELLWETHER_TRACKING=off disables tracking.
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

import yaml

from stages.params import ROOT, Params
from stages.runtime.files import atomic_text
from stages.runtime.lineage import dvc_hash, tracked_files
from stages.runtime.tracker import Tracker
from stages.tracking.cached import add_upstream_runs, record
from stages.tracking.header import Lifecycle, flatten, git_state
from stages.tracking.spool import FOLDER, Spool, is_followed, spools

__all__ = ["REGISTERED_MODEL", "SpoolTracker", "flatten", "git_state", "open_tracker", "tracking_is_off"]

CLOSE_WAIT_S = 1.5
"""Longest wait for the follower when a stage ends; it then continues on its own for up to a minute."""
MAX_FOLLOWERS = 3
REGISTERED_MODEL, MODEL_FILES, ROWS = "bellwether", "model", "rows.parquet"
"""The registered model, the artifact folder of a version, and the evaluation rows in that folder."""


def datasets(root: Path, hashes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The run's MLflow datasets: name, DVC hash, and a profile (number of files, bytes, rows per table)."""
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

            with suppress(ValueError):  # the stage itself reports a damaged table
                profile.update({f"rows of {item.stem}": pq.read_metadata(item).num_rows for item in tables[:20]})
        found.append({"name": path, "digest": digest, "profile": profile})
    return found


def write_pointer(target: Path, folder: Path, digest: str) -> Path:
    """`target/<folder's name>.dvc`, as `dvc add` writes it for `folder` with hash `digest`. A registered version holds this file
    in place of the weights: `dvc pull` or `dvc checkout` of it fetches them."""
    files = tracked_files(folder)
    size = sum(item.stat().st_size for item in files)
    entry = {"md5": digest, "size": size, "nfiles": len(files), "hash": "md5", "path": folder.name}
    path = target / f"{folder.name}.dvc"
    atomic_text(path, yaml.safe_dump({"outs": [entry]}, sort_keys=False))
    return path


class SpoolTracker(Tracker):
    """Writes events and sees to it that a follower runs. A write error (full disk) is reported once and disables tracking."""

    def __init__(self, root: Path, spool: Spool, title: str, workdir: Path | None = None, followers: int = MAX_FOLLOWERS) -> None:
        """`followers`: how many are started at most, one after another, if they are killed."""
        self.root, self.spool, self.workdir = root, spool, workdir or root
        self.title, self.followers = title, followers
        self.broken = False
        self.spent_s = 0.0
        """Seconds of the stage's own time spent in tracking."""
        self.started = 0
        self.follower: subprocess.Popen[bytes] | None = None
        self._start_follower()

    def _start_follower(self) -> None:
        """Start a follower unless one is running or starting."""
        starting = self.follower is not None and self.follower.poll() is None
        if starting or self.started >= self.followers or is_followed(self.root):
            return
        self.started += 1
        with (self.root / FOLDER / "follower.log").open("ab") as log:
            self.follower = subprocess.Popen(
                [sys.executable, "-m", "stages.tracking", "--follow", str(self.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time the block and turn its OSError into a warning that disables tracking."""
        before = time.monotonic()
        try:
            yield
        except OSError as error:
            self.broken = True
            print(f"tracking: cannot write {self.spool.path}: {error}; tracking is disabled for this run", file=sys.stderr)
        finally:
            self.spent_s += time.monotonic() - before

    def _event(self, event: dict[str, Any]) -> None:
        if self.broken:
            return
        with self._guarded():
            self.spool.append(event)
            self._start_follower()

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
            found = datasets(self.workdir, hashes)
        self._event({"kind": "datasets", "context": self.title, "datasets": found})

    def outputs(self, hashes: Mapping[str, str]) -> None:
        self.tags({f"out:{path}": value for path, value in hashes.items()})

    def artifact(self, path: Path) -> None:
        self._attach({"kind": "artifact"}, [Path(path)])

    def _attach(self, event: dict[str, Any], paths: Sequence[Path]) -> None:
        """Append an event with copies of `paths`: a later run may overwrite them before the server is reachable again."""
        if self.broken:
            return
        before = time.monotonic()
        try:
            folder = self.spool.files()
            for path in paths:
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, folder / path.name)
        except OSError as error:
            print(f"tracking: cannot attach {', '.join(map(str, paths))}: {error}; skipped", file=sys.stderr)
            return
        finally:
            self.spent_s += time.monotonic() - before
        self._event({**event, "files": folder.name})

    def episodes(self, rows: Sequence[Mapping[str, Any]], label: str, source: str, count: int = 4) -> None:
        from stages.agent.sample_episodes import choose
        from stages.tracking.episodes import trace_of

        for _, row in choose(rows, count, "traces"):
            trace = trace_of(row, source)
            self._event({"kind": "trace", **trace, "tags": {**trace["tags"], "stage": self.title, "sample": label}})

    def register_model(self, folder: Path, rows: Path, settings: Mapping[str, Any]) -> None:
        path, digest = os.path.relpath(folder, self.workdir), dvc_hash(folder)
        event = {"kind": "model", "name": REGISTERED_MODEL, "path": path, "md5": digest, "settings": dict(settings)}
        try:
            with tempfile.TemporaryDirectory() as scratch:
                files = Path(scratch) / MODEL_FILES
                write_pointer(files, folder, digest)
                shutil.copy2(rows, files / ROWS)
                self._attach(event, [files])
        except OSError as error:
            print(f"tracking: cannot register {path}: {error}; skipped", file=sys.stderr)

    def close(self, status: str) -> None:
        self.metric("tracking/stage_seconds", round(self.spent_s, 3))
        self._event({"kind": "end", "status": status})
        started = time.monotonic()
        with self._guarded():
            while self.spool.path.exists() and not self.spool.load_sent().error and time.monotonic() - started < CLOSE_WAIT_S:
                self._start_follower()
                time.sleep(0.02)
            self._warn_if_unsent()

    def _warn_if_unsent(self) -> None:
        """Warn on standard error if events are unsent and the follower is not about to send them."""
        if not self.spool.path.exists():
            return
        sent, alive = self.spool.load_sent(), is_followed(self.root) or bool(self.follower and self.follower.poll() is None)
        error = sent.error
        if alive and not sent.run_id and not error:
            # No reply yet, as at the end of any short stage: warn only if earlier stages got none either.
            error = next((earlier for spool in spools(self.root) if (earlier := spool.load_sent().error)), "")
        if alive and not error:
            return
        print(
            f"tracking: some events were not sent ({error or 'see .bellwether/tracking/follower.log'}). They stay in {FOLDER} "
            f"until the next stage or 'python -m stages.tracking' sends them",
            file=sys.stderr,
        )


def tracking_is_off() -> bool:
    return os.environ.get("BELLWETHER_TRACKING", "").lower() in ("off", "0", "false", "no")


def open_tracker(root: Path, name: str, domain: str | None, params: Params) -> Tracker:
    """The tracker of one stage run. If tracking cannot start, a warning is printed and the stage runs untracked."""
    if tracking_is_off():
        return Tracker()
    before = time.monotonic()
    # A DVC experiment may run in a temporary folder; DVC_ROOT is the checkout itself.
    home = Path(os.environ.get("DVC_ROOT", root)).absolute()
    lifecycle = Lifecycle.now(home, params)
    header = lifecycle.header(name, domain)
    try:
        if os.environ.get("DVC_STAGE"):  # outside DVC, the files may differ from dvc.lock
            add_upstream_runs(lifecycle, root, name, domain)
        record(lifecycle, header["title"])
        tracker = SpoolTracker(home, Spool.create(home, header), header["title"], root)
    except OSError as error:
        print(f"tracking: cannot start ({error}); this run is not tracked", file=sys.stderr)
        return Tracker()
    tracker.spent_s += time.monotonic() - before
    return tracker
