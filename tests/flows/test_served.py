"""`make serve` as a team leaves it running: real server, worker and schedules, over a small DVC project."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest
from served import Served, add_flows, until
from small_project import add_work, do, make_project

pytestmark = [pytest.mark.timeout(3600), pytest.mark.long(100)]  # a busy machine makes servers slow, not wrong


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = add_work(make_project(tmp_path_factory.mktemp("served")))
    text = (root / "dvc.yaml").read_text()
    (root / "dvc.yaml").write_text(text.replace("echo ${item.domain} ${scale} >", "echo $LIFECYCLE_RUN_ID $LIFECYCLE_RUN_NAME >"))
    add_flows(root)
    found = Served.start(root)
    try:
        yield found
    finally:
        found.kill()


def states(served: Served, run: str) -> dict[str, str]:
    return {name: task["state"]["name"] for name, task in served.tasks(run).items()}


def test_a_schedule_makes_runs(served: Served) -> None:
    """A deployment with a cron schedule is run by the clock alone; SQLAlchemy 2.1 or a newer FastAPI would keep it from that."""

    def by_the_clock() -> str | None:
        runs = [run for run in served.runs("lifecycle-nightly") if run["auto_scheduled"]]
        return next((run["id"] for run in runs if run["state"]["type"] not in ("SCHEDULED", "PENDING")), None)

    run = until(by_the_clock, "a scheduled run")
    served.api("PATCH", f"/deployments/{served.deployment('lifecycle-nightly')['id']}", json={"paused": True})
    for begun in served.runs("lifecycle-nightly"):  # on a slow machine the next minute's, too; those to come are gone
        assert served.end_of(begun["id"])["type"] == "COMPLETED"
    assert states(served, run) == {"make": "Ran", "join": "Ran", "work": "Ran"}
    assert (served.root / "worked.txt").exists()
    assert {"stages", "stage-make", "stage-join", "stage-work"} <= set(served.artifacts(run))
    messages = {name: task["state"]["message"] for name, task in served.tasks(run).items()}
    assert messages["make"] == "ran: make@a, make@b"
    # All stages of a run know its id, under which MLflow keeps them together, and its name, by which it shows them.
    name = next(item["name"] for item in served.runs("lifecycle-nightly") if item["id"] == run)
    assert (served.root / "joined.txt").read_text().split() == [run, name, run, name]


def test_from_a_terminal_it_is_the_same_flow_and_does_nothing_twice(served: Served) -> None:
    environment = {**served.environment, "PREFECT_API_URL": f"http://127.0.0.1:{served.port}/api"}
    command = [sys.executable, "-m", "flows.lifecycle", "--until", "join"]
    done = subprocess.run(command, cwd=served.root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line.split(None, 2)[1:] for line in done.stdout.splitlines() if line.startswith("lifecycle: ")]
    assert [stage for stage, _ in said] == ["make", "join"]  # --until join: `work` was left alone
    assert all(what.startswith("up to date: ") for _, what in said)


def test_a_change_starts_a_run_and_cancelling_it_ends_every_process(served: Served) -> None:
    """Editing params.yaml starts the pipeline; cancelling it leaves none of its processes, in whatever session they are, and a
    checkout in which the next run goes on."""
    until(lambda: (served.root / ".bellwether" / "watch.json").exists(), "the first look")
    serving = {process.pid for process in served.processes()}
    do(served.root, "hold")
    (served.root / "params.yaml").write_text("domains: [a, b]\nscale: 2\n")
    until(lambda: (served.root / "pids").exists(), "the stage at work")
    (run,) = [item for item in served.runs("lifecycle-on-change") if item["state"]["type"] == "RUNNING"]
    assert "params.yaml changed" in served.api("GET", f"/flow_run_states/?flow_run_id={run['id']}")[0]["message"]
    bar = until(lambda: served.artifacts(run["id"]).get("progress-work-training"), "the stage's progress")
    assert float(bar["data"]) == 25.0

    started = {process.pid for process in served.processes()} - serving
    child = int((served.root / "pids").read_text())
    assert child in started
    assert len(started) >= 5  # the flow, the supervisor, DVC, the stage, its child
    served.api("POST", f"/flow_runs/{run['id']}/set_state", json={"state": {"type": "CANCELLING"}})
    until(lambda: not any(psutil.pid_exists(pid) for pid in started), "every process ended")
    assert served.end_of(run["id"])["type"] == "CANCELLED"


@pytest.mark.slow
def test_after_it_a_stage_that_fails_for_an_outside_reason_is_tried_again(served: Served) -> None:
    do(served.root, "fail 1")
    run = served.run("lifecycle-on-change", retries=1, retry_delay_s=0)
    assert served.end_of(run)["type"] == "COMPLETED"
    assert (served.root / "attempts").read_text() == "xx"
    assert served.tasks(run)["work"]["run_count"] == 2
    assert states(served, run) == {"make": "UpToDate", "join": "UpToDate", "work": "Ran"}


@pytest.mark.slow
def test_one_that_fails_on_its_parameters_is_not_and_the_run_says_why(served: Served) -> None:
    do(served.root, "bad")
    run = served.run("lifecycle-on-change", retries=3, retry_delay_s=0)
    state = served.end_of(run)
    assert state["type"] == "FAILED"
    assert "unknown key 'rl.step'. Did you mean 'steps'?" in state["message"]
    assert (served.root / "attempts").read_text() == "x"


def test_bad_settings_are_refused_before_anything_runs(served: Served) -> None:
    """What the UI's form and the API take has the ranges of the flow's pydantic model."""
    schema = served.deployment("lifecycle-nightly")["parameter_openapi_schema"]
    fields = schema["definitions"]["Settings"]["properties"]
    assert fields["retries"]["maximum"] == 10
    assert fields["until"]["anyOf"][0]["enum"] == ["make", "join", "work"]
    for wrong in ({"retries": 11}, {"jobs": 0}, {"retires": 1}, {"until": "rollouts"}):
        with pytest.raises(httpx.HTTPStatusError, match="409"):
            served.run("lifecycle-nightly", **wrong)


def test_one_gpu_and_one_run_per_checkout_at_a_time(served: Served) -> None:
    assert served.api("GET", "/v2/concurrency_limits/gpu")["limit"] == 1
    queues = {item["name"]: item for item in served.api("POST", "/work_pools/bellwether/queues/filter", json={})}
    assert queues["checkout"]["concurrency_limit"] == 1
    for name in ("lifecycle-nightly", "lifecycle-on-change"):
        assert served.deployment(name)["work_queue_name"] == "checkout"


def test_stop_leaves_no_process_and_no_run_that_looks_alive(served: Served) -> None:
    """Last in this module: it ends what the others use."""
    do(served.root, "hold again")
    run = served.run("lifecycle-on-change")
    until(lambda: (served.root / "pids").exists(), "the stage at work")
    assert "stopped" in served.stop()
    assert served.process.wait(30) == 0
    assert not served.processes()
    with sqlite3.connect(served.root / ".prefect" / "prefect.db") as database:
        (state,) = database.execute("SELECT state_type FROM flow_run WHERE id = ?", (run,)).fetchone()
    assert state in ("CRASHED", "CANCELLED", "FAILED")
