"""Seconds per stage and tokens fed per sampled token of the last lifecycle, read from the local MLflow database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.startup import SkippedError
from stages.runtime.speed import STAGES

STORE = "mlflow.db"


@contextmanager
def opened(root: Path) -> Iterator[sqlite3.Connection]:
    """The store, read-only. Raises SkippedError if it does not exist."""
    path = root / STORE
    if not path.is_file():
        raise SkippedError(f"{STORE} does not exist; run 'make lifecycle' first")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        yield connection


def last_runs(connection: sqlite3.Connection) -> dict[str, tuple[str, float]]:
    """Title of a stage -> (run id, seconds) of its last run that was executed and finished."""
    query = """
        SELECT name, run_uuid, start_time, end_time FROM runs WHERE status = 'FINISHED' AND run_uuid NOT IN
        (SELECT run_uuid FROM tags WHERE key = 'dvc.state' AND value != 'ran') ORDER BY start_time
    """
    found: dict[str, tuple[str, float]] = {}
    for name, run, start, end in connection.execute(query):
        if name.split("@")[0] in STAGES and end:
            found[name] = (run, (end - start) / 1000)
    return found


def recorded(root: Path) -> dict[str, Any]:
    """{"seconds": {stage: s}, "commits": {stage: commit}, "fed_per_sampled_token": {stage: tokens}}."""
    with opened(root) as connection:
        runs = last_runs(connection)
        if not runs:
            raise SkippedError(f"{STORE} has no finished stage; run 'make lifecycle' first")
        commits, fed = {}, {}
        for title, (run, _) in runs.items():
            tags = dict(connection.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run,)))
            commits[title] = tags.get("git.commit", "unknown")
            metrics = dict(connection.execute("SELECT key, value FROM latest_metrics WHERE run_uuid = ?", (run,)))
            sampled = metrics.get("speed/sampled_tokens_per_s", 0.0)
            if sampled:
                # A sampled token is also fed, to sample the next one.
                fed[title] = round((metrics["speed/fed_tokens_per_s"] + sampled) / sampled, 4)
    seconds = {title: round(seconds, 2) for title, (_, seconds) in runs.items()}
    return {"seconds": seconds, "commits": commits, "fed_per_sampled_token": fed}
