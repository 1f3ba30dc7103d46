"""`python -m flows.watch`: start the deployment lifecycle-on-change whenever params.yaml or data/raw changed.

A poll stats the files; it reads them, and imports Prefect, only if sizes or times changed. A change takes effect once two polls
agree, so that files are not read while they are written. .bellwether/watch.json holds the last state: changes made while no watch
ran are found at the next start; the very first poll starts nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flows.process import ROOT
from stages.runtime.command import command
from stages.runtime.files import atomic_text

WATCHED = ("params.yaml", "data/raw")
SEEN = Path(".bellwether") / "watch.json"
DEPLOYMENT = "lifecycle/lifecycle-on-change"
EVERY_S = 5.0


def files(root: Path) -> list[Path]:
    """All watched files, in a fixed order."""
    found: list[Path] = []
    for name in WATCHED:
        path = root / name
        found += sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path] if path.exists() else []
    return found


def stats(root: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and modification time of each file."""
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files(root))


def hashes(root: Path) -> dict[str, str]:
    """Watched path -> hash of its file names and contents."""
    digests = {name: hashlib.sha256() for name in WATCHED}
    for path in files(root):
        relative = path.relative_to(root).as_posix()
        digest = next(digests[name] for name in WATCHED if relative == name or relative.startswith(f"{name}/"))
        digest.update(relative.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


class Watch:
    """Polls the files and calls `start(reason)` after a change; if that raises, the next poll calls it again."""

    def __init__(self, root: Path, start: Callable[[str], None]) -> None:
        self.root, self.start = root, start
        self.polled: object = None
        self.settled: object = None

    def poll(self) -> str | None:
        """Poll once; the reason why a run was started, None if none was."""
        now = stats(self.root)
        stable = now == self.polled
        self.polled = now
        if not stable or now == self.settled:
            return None
        current, path = hashes(self.root), self.root / SEEN
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else current
        changed = [name for name in WATCHED if current[name] != before.get(name)]
        reason = ", ".join(f"{name} changed ({before.get(name, 'new')} to {current[name]})" for name in changed)
        if changed:
            self.start(reason)
        atomic_text(path, json.dumps(current))
        self.settled = now
        return reason or None


def start_run(reason: str) -> None:
    """Schedule the deployment, unless it is paused or a scheduled run of it will see the change."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import StateType
    from prefect.states import Scheduled

    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(DEPLOYMENT)
        if deployment.paused:
            print(f"watch: {reason}; {DEPLOYMENT} is paused", flush=True)
            return
        waiting = {
            "deployment_id": {"any_": [deployment.id]},
            "state": {"type": {"any_": [StateType.SCHEDULED, StateType.PENDING]}},
        }
        if client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(waiting), limit=1):
            print(f"watch: {reason}; a run is already scheduled", flush=True)
            return
        run = client.create_flow_run_from_deployment(deployment.id, state=Scheduled(message=reason))
        print(f"watch: {reason}; run {run.name} started", flush=True)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.watch", description="Start a lifecycle when its inputs changed.")
    parser.add_argument("--every", type=float, default=EVERY_S, metavar="S", help="seconds between polls")
    options = parser.parse_args()
    if not os.environ.get("PREFECT_API_URL"):
        print("watch: set PREFECT_API_URL to the server's API, e.g. http://127.0.0.1:4200/api", file=sys.stderr)
        return 2
    watch = Watch(ROOT, start_run)
    while True:
        try:
            watch.poll()
        except Exception as error:
            # The server is down, or a file was removed while it was read: the next poll tries again.
            print(f"watch: {type(error).__name__}: {error}; retrying", file=sys.stderr, flush=True)
        time.sleep(options.every)


if __name__ == "__main__":
    sys.exit(main())
