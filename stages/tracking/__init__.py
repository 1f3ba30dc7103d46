"""MLflow tracking that can neither slow a stage down nor stop it.

The stage appends events to a spool file (spool.py) and never waits. A follower process (follower.py, a child of the stage)
sends them every few seconds through sender.py, the only module that imports mlflow, so the UI is live. What a slow or
absent server missed stays in the spool; `python -m stages.tracking --replay` sends it, and so does the next stage's follower.

Server: MLFLOW_TRACKING_URI, else the file mlflow.db in the project's root. BELLWETHER_TRACKING=off switches tracking off.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.params import ROOT, Params, params_hash
from stages.tracking.spool import FOLDER, Spool

CLOSE_WAIT_S = 5.0
"""Longest wait for the follower when a stage ends; after that it goes on by itself, for a minute at most."""
CLOSE_WAIT_UNREACHABLE_S = 2.0
"""The same, once the follower has reported that the server does not answer."""
REGISTERED_MODEL = "bellwether"


class Tracker:
    """What a stage tells about itself. This class keeps nothing; it is what BELLWETHER_TRACKING=off gives."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters of the run; nested mappings are flattened to dotted names."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Tags of the run; a later value replaces an earlier one."""

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        """One point of a curve."""

    def artifact(self, path: Path) -> None:
        """Attach a file or folder, as it is when the follower gets to it (seconds later)."""

    def trace(self, name: str, turns: list[dict[str, Any]], tags: Mapping[str, str]) -> None:
        """A sample episode: one span per turn, whose `action` is the span's input and everything else its output."""

    def register_model(self, name: str, folder: Path) -> None:
        """Log `folder` (a save_pretrained folder) and make it the newest version of registered model `name`, alias champion."""

    def close(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an empty mapping stays one value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class SpoolTracker(Tracker):
    """Writes events and keeps a follower running. An event that cannot be written (full disk) is reported once and let go."""

    def __init__(self, root: Path, spool: Spool, header: dict[str, Any]) -> None:
        self.root, self.spool = root, spool
        self.broken = False
        self._event(header)
        with (root / FOLDER / "follower.log").open("ab") as log:
            self.follower = subprocess.Popen(
                [sys.executable, "-m", "stages.tracking", "--follow", str(spool.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def _event(self, event: dict[str, Any]) -> None:
        if self.broken:
            return
        try:
            self.spool.append(event)
        except OSError as error:
            self.broken = True
            print(f"tracking: cannot write {self.spool.path}: {error}; this run is not tracked further", file=sys.stderr)

    def params(self, values: Mapping[str, Any]) -> None:
        self._event({"kind": "params", "values": {key: str(value) for key, value in flatten(values).items()}})

    def tags(self, values: Mapping[str, str]) -> None:
        self._event({"kind": "tags", "values": {key: str(value) for key, value in values.items()}})

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self._event({"kind": "metric", "name": name, "value": float(value), "step": int(step or 0)})

    def artifact(self, path: Path) -> None:
        self._event({"kind": "artifact", "path": str(Path(path).absolute())})

    def trace(self, name: str, turns: list[dict[str, Any]], tags: Mapping[str, str]) -> None:
        turns = json.loads(json.dumps(turns, default=str))
        self._event({"kind": "trace", "name": name, "turns": turns, "tags": {key: str(value) for key, value in tags.items()}})

    def register_model(self, name: str, folder: Path) -> None:
        self._event({"kind": "model", "name": name, "path": str(Path(folder).absolute())})

    def close(self, status: str) -> None:
        self._event({"kind": "end", "status": status})
        try:
            if self.follower.stdin is not None:
                self.follower.stdin.close()
        except BrokenPipeError:
            print("tracking: the follower ended early; see .bellwether/tracking/follower.log", file=sys.stderr)
        started = time.monotonic()
        while self.spool.path.exists() and self.follower.poll() is None:
            waited = time.monotonic() - started
            if waited > CLOSE_WAIT_S or (waited > CLOSE_WAIT_UNREACHABLE_S and self.spool.load_sent().error):
                break
            time.sleep(0.02)
        self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        if not self.spool.path.exists():
            return
        error = self.spool.load_sent().error
        if self.follower.poll() is None and not error:
            print("tracking: MLflow is slow; the rest is sent in the background", file=sys.stderr)
            return
        print(
            f"tracking: not everything was sent ({error or 'see .bellwether/tracking/follower.log'}). It is kept in {FOLDER}; "
            f"the next stage sends it, or 'python -m stages.tracking --replay'",
            file=sys.stderr,
        )


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_state(root: Path) -> tuple[str, bool]:
    """(commit, whether tracked files differ from it). What the pipeline itself writes does not count as a difference."""
    commit = _git(root, "rev-parse", "HEAD") or "none"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!dvc.lock", ":!reports")
    return commit, bool(changed)


def run_header(root: Path, name: str, domain: str | None, params: Params) -> dict[str, Any]:
    """What a run is, as it stands when the stage starts: all that the follower, or a replay months later, needs."""
    title = f"{name}@{domain}" if domain else name
    commit, dirty = git_state(root)
    digest = params_hash(params)
    given = os.environ.get("LIFECYCLE_RUN_ID")
    key = given or hashlib.sha256(f"{commit} {digest}".encode()).hexdigest()[:16]
    values: dict[str, Any] = {"seed": params.seed, "model": params.model, "resources": params.resources}
    if domain and hasattr(params.per_domain[domain], name):
        values[name] = params.section(name, domain)
        values["environment"] = params.per_domain[domain].environment
    elif hasattr(params, name):
        values[name] = getattr(params, name)
    own = {key: value.model_dump(mode="json") if hasattr(value, "model_dump") else value for key, value in values.items()}
    tags = {
        "stage": name,
        "domain": domain or "all",
        "git.commit": commit,
        "git.dirty": str(dirty).lower(),
        "params.hash": digest,
    }
    return {
        "kind": "run",
        "title": title,
        "root": str(root),
        "pid": os.getpid(),
        "lifecycle": key,
        "tags": tags,
        "params": {key: str(value) for key, value in flatten(own).items()},
        "lifecycle_params": {key: str(value) for key, value in flatten(params.model_dump(mode="json")).items()},
    }


def open_tracker(root: Path, name: str, domain: str | None, params: Params) -> Tracker:
    """The tracker of one stage run. Tracking that cannot start is reported and left off: it never stops a stage."""
    if os.environ.get("BELLWETHER_TRACKING", "").lower() in ("off", "0", "false", "no"):
        return Tracker()
    root = Path(os.environ.get("DVC_ROOT", root)).absolute()
    header = run_header(root, name, domain, params)
    try:
        return SpoolTracker(root, Spool.create(root, header["title"]), header)
    except OSError as error:
        print(f"tracking: cannot start ({error}); this run is not tracked", file=sys.stderr)
        return Tracker()
