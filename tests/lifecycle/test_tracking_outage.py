"""A real MLflow server is killed while rl trains: training continues, no event is lost, and the rest arrives when the server is
back."""

from __future__ import annotations

import csv
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import Checkout
from mlflow_server import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.long(30)]
STEPS = 40


def points(database: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of metric `name` of the runs called rl@search, in the order of the steps."""
    query = (
        "SELECT step, value FROM metrics JOIN runs ON metrics.run_uuid = runs.run_uuid "
        "WHERE runs.name = 'rl@search' AND metrics.key = ? ORDER BY step"
    )
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return [(int(step), float(value)) for step, value in connection.execute(query, (name,))]


def test_training_survives_a_server_outage_without_losing_events(done: Checkout, empty_database: Path, tmp_path: Path) -> None:
    done.edit({"rl": {"steps": STEPS}})
    folder = tmp_path / "server"
    folder.mkdir()
    database = folder / "mlflow.db"
    with serving(folder, empty_database) as server:
        environment = {**done.env, "BELLWETHER_TRACKING": "on", "MLFLOW_TRACKING_URI": server.url}
        stage = subprocess.Popen(
            [sys.executable, "-m", "stages.rl", "--domain", "search"],
            cwd=done.root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 300
        while not points(database, "success"):
            assert stage.poll() is None, "the stage ended before a step reached the server"
            assert time.monotonic() < deadline, "no step reached the server"
            time.sleep(0.05)
        server.kill()
        received = len(points(database, "success"))
        assert stage.poll() is None
        assert received < STEPS

        _, errors = stage.communicate(timeout=600)
        assert stage.returncode == 0, errors
        spools = done.root / ".bellwether" / "tracking"
        assert list(spools.glob("*rl@search.jsonl"))
        assert len(points(database, "success")) == received

        server.start()
        replay = [sys.executable, "-m", "stages.tracking", "--replay"]
        deadline = time.monotonic() + 120
        # The stage's follower may lock its file for a few more seconds.
        while subprocess.run(replay, cwd=done.root, env=environment, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, "the spooled events do not arrive"
        assert not list(spools.glob("*.jsonl"))
        assert not list(spools.glob("*.files"))

        with (done.root / "reports" / "rl" / "search_history.csv").open(newline="") as handle:
            rows = list(csv.DictReader(handle))
        for name in ("success", "kl", "loss"):
            assert [step for step, _ in points(database, name)] == list(range(1, STEPS + 1))
            assert [value for _, value in points(database, name)] == pytest.approx([float(row[name]) for row in rows], rel=1e-6)
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT status FROM runs WHERE name = 'rl@search'").fetchall() == [("FINISHED",)]
        assert connection.execute("SELECT COUNT(*) FROM trace_info").fetchone() == (8,)
    artifacts = {path.name for path in (folder / "mlartifacts").rglob("*") if path.is_file()}
    assert {"search.json", "search_history.csv"} <= artifacts
