"""A cancelled run is KILLED in MLflow, too: the stage's follower gets time to report it before it is ended."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from served import until

from stages.tracking.server import create_database

ROOT = Path(__file__).resolve().parents[2]
STAGE = """
import sys, time
from pathlib import Path
from stages.params import parse_params
from stages.tracking import open_tracker

params = parse_params({"domains": ["search"], "per_domain": {"search": {}}})
tracker = open_tracker(Path(sys.argv[1]), "rl", "search", params)
tracker.metric("loss", 1.0, 0)
time.sleep(300)
"""


def status(database: Path) -> str | None:
    with sqlite3.connect(database) as connection:
        found = connection.execute("SELECT status FROM runs WHERE name = 'rl@search'").fetchone()
    return found[0] if found else None


@pytest.mark.slow
def test_cancelled_stage_is_marked_killed_in_mlflow(tmp_path: Path) -> None:
    create_database(tmp_path / "mlflow.db", tmp_path / "artifacts")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "BELLWETHER_", "DVC_"))}
    command = [sys.executable, "-m", "flows.supervise", sys.executable, "-c", STAGE, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)})
    until(lambda: status(tmp_path / "mlflow.db") == "RUNNING", "the run in MLflow")
    process.terminate()
    process.wait(30)
    assert status(tmp_path / "mlflow.db") == "KILLED"
