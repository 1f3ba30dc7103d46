"""`make serve` as a team leaves it running: real server, worker and schedules, over a small DVC project."""

from __future__ import annotations

import json
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from served import WAIT_S, Served, add_flows, until
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
    assert states(served, run) == dict.fromkeys(("make@a", "make@b", "join", "work"), "Ran")
    assert (served.root / "worked.txt").exists()
    assert {"stages", "stage-make-a", "stage-join", "stage-work"} <= set(served.artifacts(run))
    messages = {name: task["state"]["message"] for name, task in served.tasks(run).items()}
    assert messages["make@a"] == "ran: make@a"
    # All stages of a run know its id, under which MLflow keeps them together, and its name, by which it shows them.
    name = next(item["name"] for item in served.runs("lifecycle-nightly") if item["id"] == run)
    assert (served.root / "joined.txt").read_text().split() == [run, name, run, name]


STRANGERS = ("attacker.example", "127.0.0.1.attacker.example", "10.attacker.example")
"""Names that a page can have; the last looks like the start of a private address."""


def said(port: int, method: str, path: str, host: str = "", origin: str = "", **values: Any) -> httpx.Response:
    """The answer to a request as a browser sends it, without a password unless `auth` is given."""
    headers = {
        **({"Host": f"{host}:{port}"} if host else {}),
        **({"Origin": origin} if origin else {}),
        **values.pop("headers", {}),
    }
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False) as client:
        return client.request(method, path, headers=headers, **values)


def test_no_web_page_can_start_a_run(served: Served) -> None:
    """Contract: whoever has no password starts nothing, though a run may say what command the worker is to run; a browser neither
    sends it for a page nor shows a page what the server says."""
    deployment = served.deployment("lifecycle-on-change")["id"]
    mark = served.root / "ran"
    run = {"state": {"type": "SCHEDULED"}, "job_variables": {"command": f"touch {mark}"}}
    path = f"/api/deployments/{deployment}/create_flow_run"
    before = len(served.runs("lifecycle-on-change"))
    for origin in ("https://attacker.example", "null", f"http://127.0.0.1:{served.port}"):
        assert said(served.port, "POST", path, origin=origin, json=run).status_code == 401
        assert said(served.port, "POST", path, origin=origin, json=run, auth=("bellwether", "guess")).status_code == 401
        text = said(served.port, "POST", path, origin=origin, content=json.dumps(run), headers={"Content-Type": "text/plain"})
        assert text.status_code == 401
    for host in STRANGERS:
        assert said(served.port, "POST", path, host=host, json=run, auth=served.auth).status_code == 400
        assert said(served.port, "GET", "/", host=host).status_code == 400
    assert len(served.runs("lifecycle-on-change")) == before
    assert not mark.exists()
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in (("https://attacker.example", False), ("null", False), (f"http://localhost:{served.port}", True)):
        for answer in (
            said(served.port, "OPTIONS", path, origin=origin, headers=asked),
            said(served.port, "GET", "/api/flow_runs/", origin=origin, auth=served.auth),
        ):
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
    password = served.root / ".prefect" / "auth"
    assert stat.S_IMODE(password.stat().st_mode) == 0o600
    logs = "".join(path.read_text() for path in (served.root / ".bellwether" / "serve").glob("*.log"))
    assert served.auth[1] not in logs + (served.root / "serve.log").read_text()


def heard(address: str, protocols: list[str]) -> Any:
    """The first answer of a websocket to a guess at the password."""
    from websockets.sync.client import connect

    with connect(address, subprotocols=protocols, proxy=None) as socket:  # type: ignore[arg-type]
        socket.send(json.dumps({"type": "auth", "token": "guess"}))
        return socket.recv(60)


def test_sockets_of_events_and_logs_want_the_password(served: Served) -> None:
    from websockets.exceptions import WebSocketException

    for path in ("events/in", "events/out", "logs/out"):
        for protocols in ([], ["prefect"]):
            with pytest.raises(WebSocketException):
                heard(f"ws://127.0.0.1:{served.port}/api/{path}", protocols)


def test_mlflow_and_the_report_answer_this_machines_own_names(served: Served) -> None:
    """Contract: a page whose name was pointed at 127.0.0.1 reads nothing, and one of another site changes nothing."""
    api = "/api/2.0/mlflow/experiments"
    for host in STRANGERS:
        assert said(served.mlflow_port, "GET", f"{api}/search?max_results=1", host=host).status_code == 403
        assert said(served.report_port, "GET", "/report.html", host=host).status_code == 400
    for host in ("localhost", "127.0.0.1"):
        assert said(served.mlflow_port, "GET", f"{api}/search?max_results=1", host=host).status_code == 200
        assert said(served.report_port, "GET", "/dvc.yaml", host=host).status_code == 200
    for origin in ("https://attacker.example", "null"):
        made = said(served.mlflow_port, "POST", f"{api}/create", origin=origin, json={"name": "theirs"})
        assert made.status_code == 403
        read = said(served.mlflow_port, "GET", f"{api}/search?max_results=1", origin=origin)
        assert "access-control-allow-origin" not in read.headers
    assert said(served.report_port, "GET", "/").headers["location"] == "/report.html"
    assert said(served.report_port, "GET", "/../params.yaml").status_code == 404


def test_the_command_line_gets_in_with_the_password(served: Served) -> None:
    """Contract: the line that docs/prefect.md gives is what `prefect` needs; without it the server says 401."""
    prefect = f"PREFECT_HOME=$PWD/.prefect PREFECT_API_URL=http://127.0.0.1:{served.port}/api"
    for given, works in ((f"{prefect} PREFECT_API_AUTH_STRING=$(cat .prefect/auth)", True), (prefect, False)):
        line = f"export {given}; {sys.executable} -m prefect deployment ls"
        done = subprocess.run(
            ["bash", "-c", line], cwd=served.root, env=served.environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) is works
        assert ("lifecycle-nightly" in done.stdout) is works
    assert "401" in done.stdout + done.stderr


def test_from_a_terminal_it_is_the_same_flow_and_does_nothing_twice(served: Served) -> None:
    environment = {**served.environment, "PREFECT_API_URL": f"http://127.0.0.1:{served.port}/api"}
    command = [sys.executable, "-m", "flows.lifecycle", "--until", "join"]
    done = subprocess.run(command, cwd=served.root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line.split(None, 2)[1:] for line in done.stdout.splitlines() if line.startswith("lifecycle: ")]
    assert [stage for stage, _ in said] == ["make@a", "make@b", "join"]  # --until join: `work` was left alone
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
    assert states(served, run) == {"make@a": "UpToDate", "make@b": "UpToDate", "join": "UpToDate", "work": "Ran"}


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
