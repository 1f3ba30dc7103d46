"""The real stages under `make serve`: a killed and a cancelled run end with all their processes, are KILLED in MLflow, and the
next run resumes from the checkpoint."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from checkout import Checkout
from served import Served, until

pytestmark = [pytest.mark.timeout(3600), pytest.mark.slow]
STEPS = 300


@pytest.fixture
def served(done: Checkout) -> Iterator[Served]:
    done.edit({"per_domain": {"search": {"rl": {"steps": STEPS}}}})
    found = Served.start(done.root)
    try:
        yield found
    finally:
        found.kill()


def query(root: Path, sql: str, *values: object) -> list[tuple]:
    # Not read-only: after a kill the reader may have to roll back the writer's transaction.
    with sqlite3.connect(f"file:{root / 'mlflow.db'}?mode=rw", uri=True) as database:
        return database.execute(sql, values).fetchall()


def stage_runs(root: Path, flow_run: str) -> list[tuple[str, str]]:
    """(id, status) of the runs of rl@search that belong to a flow run."""
    sql = """
        SELECT runs.run_uuid, runs.status FROM runs
        JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = 'lifecycle.of' AND tags.value = ?
        WHERE runs.name = 'rl@search'
    """
    return query(root, sql, flow_run)


def steps(root: Path, run: str) -> list[int]:
    return [step for (step,) in query(root, "SELECT step FROM metrics WHERE run_uuid = ? AND key = 'success' ORDER BY step", run)]


def training(served: Served, flow_run: str) -> str:
    """Id of the run of rl@search, as soon as a step of this flow run has reached MLflow."""

    def found() -> str | None:
        runs = stage_runs(served.root, flow_run)
        return runs[0][0] if runs and steps(served.root, runs[0][0]) else None

    return until(found, "a step of rl@search in MLflow")


def test_killed_and_cancelled_runs_leave_no_process_and_are_resumed(served: Served) -> None:
    until(lambda: served.api("POST", "/work_pools/bellwether/workers/filter", json={}), "the worker")
    serving = {process.pid for process in served.processes()}
    reached = 0
    for end, expected in (("kill -9", "CRASHED"), ("cancel", "CANCELLED")):
        flow_run = served.run("lifecycle-on-change", until="rl")
        run = training(served, flow_run)
        started = [process for process in served.processes() if process.pid not in serving]
        assert len(started) >= 5, "the flow, the supervisor, DVC, the stage, its follower"
        if end == "cancel":
            served.api("POST", f"/flow_runs/{flow_run}/set_state", json={"state": {"type": "CANCELLING"}})
        else:
            flow = next(process.parent() for process in started if "flows.supervise" in process.cmdline())
            assert flow is not None
            flow.kill()
        until(lambda started=started: not any(process.is_running() for process in started), "every process ended")
        assert served.end_of(flow_run)["type"] == expected
        assert until(lambda run=flow_run: (found := stage_runs(served.root, run))[0][1] != "RUNNING" and found, end) == [
            (run, "KILLED")
        ]
        name = served.api("GET", f"/flow_runs/{flow_run}")["name"]
        assert query(served.root, "SELECT status FROM runs WHERE name = ?", f"lifecycle {name}") == [("KILLED",)]
        assert min(steps(served.root, run)) > reached, "it resumes where the previous run was ended"
        reached = min(steps(served.root, run))
    flow_run = served.run("lifecycle-on-change", until="rl")
    assert served.end_of(flow_run)["type"] == "COMPLETED"
    ((run, status),) = stage_runs(served.root, flow_run)
    assert status == "FINISHED"
    assert steps(served.root, run)[-1] == STEPS
    assert steps(served.root, run)[0] > reached

    def ended() -> bool:
        """The run's state changes shortly before its process ends."""
        return not [process for process in served.processes() if process.pid not in serving and psutil.pid_exists(process.pid)]

    until(ended, "every process ended")
