"""`make serve` with a real server, worker and schedules, over a small DVC project."""

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
from small_project import add_work, make_project, set_behaviour

pytestmark = [pytest.mark.timeout(3600), pytest.mark.long(170)]  # a busy machine makes servers slow, not wrong


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


def test_schedule_starts_runs(served: Served) -> None:
    """A cron schedule alone starts runs; SQLAlchemy 2.1 or a newer FastAPI would break that."""

    def scheduled_run() -> str | None:
        runs = [run for run in served.runs("lifecycle-nightly") if run["auto_scheduled"]]
        return next((run["id"] for run in runs if run["state"]["type"] not in ("SCHEDULED", "PENDING")), None)

    run = until(scheduled_run, "a scheduled run")
    served.api("PATCH", f"/deployments/{served.deployment('lifecycle-nightly')['id']}", json={"paused": True})
    for begun in served.runs("lifecycle-nightly"):  # on a slow machine also the next minute's; pausing has removed later ones
        assert served.end_of(begun["id"])["type"] == "COMPLETED"
    assert states(served, run) == dict.fromkeys(("make@a", "make@b", "join", "work"), "Ran")
    assert (served.root / "worked.txt").exists()
    assert {"stages", "stage-make-a", "stage-join", "stage-work"} <= set(served.artifacts(run))
    messages = {name: task["state"]["message"] for name, task in served.tasks(run).items()}
    assert messages["make@a"] == "ran: make@a"
    # All stages of a run know its id, by which MLflow groups them, and its name, which MLflow shows.
    name = next(item["name"] for item in served.runs("lifecycle-nightly") if item["id"] == run)
    assert (served.root / "joined.txt").read_text().split() == [run, name, run, name]


FOREIGN_HOSTS = ("attacker.example", "127.0.0.1.attacker.example", "10.attacker.example")
"""Host names of web pages; the last resembles a private address."""


def request(port: int, method: str, path: str, host: str = "", origin: str = "", **values: Any) -> httpx.Response:
    """The response to a request as a browser sends it, without a password unless `auth` is given."""
    headers = {
        **({"Host": f"{host}:{port}"} if host else {}),
        **({"Origin": origin} if origin else {}),
        **values.pop("headers", {}),
    }
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False) as client:
        return client.request(method, path, headers=headers, **values)


def test_web_page_cannot_start_a_run(served: Served) -> None:
    """Contract: without the password nothing starts, although a run may name a command for the worker; a browser neither sends
    the password for a page nor shows a page the responses."""
    deployment = served.deployment("lifecycle-on-change")["id"]
    mark = served.root / "ran"
    run = {"state": {"type": "SCHEDULED"}, "job_variables": {"command": f"touch {mark}"}}
    path = f"/api/deployments/{deployment}/create_flow_run"
    before = len(served.runs("lifecycle-on-change"))
    for origin in ("https://attacker.example", "null", f"http://127.0.0.1:{served.port}"):
        assert request(served.port, "POST", path, origin=origin, json=run).status_code == 401
        assert request(served.port, "POST", path, origin=origin, json=run, auth=("bellwether", "guess")).status_code == 401
        text = request(served.port, "POST", path, origin=origin, content=json.dumps(run), headers={"Content-Type": "text/plain"})
        assert text.status_code == 401
    for host in FOREIGN_HOSTS:
        assert request(served.port, "POST", path, host=host, json=run, auth=served.auth).status_code == 400
        assert request(served.port, "GET", "/", host=host).status_code == 400
    assert len(served.runs("lifecycle-on-change")) == before
    assert not mark.exists()
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in (("https://attacker.example", False), ("null", False), (f"http://localhost:{served.port}", True)):
        for answer in (
            request(served.port, "OPTIONS", path, origin=origin, headers=preflight),
            request(served.port, "GET", "/api/flow_runs/", origin=origin, auth=served.auth),
        ):
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
    password = served.root / ".prefect" / "auth"
    assert stat.S_IMODE(password.stat().st_mode) == 0o600
    logs = "".join(path.read_text() for path in (served.root / ".bellwether" / "serve").glob("*.log"))
    assert served.auth[1] not in logs + (served.root / "serve.log").read_text()


def first_reply(address: str, protocols: list[str]) -> Any:
    """The first reply of a websocket to a wrong password."""
    from websockets.sync.client import connect

    with connect(address, subprotocols=protocols, proxy=None) as socket:  # type: ignore[arg-type]
        socket.send(json.dumps({"type": "auth", "token": "guess"}))
        return socket.recv(60)


def test_event_and_log_websockets_require_the_password(served: Served) -> None:
    from websockets.exceptions import WebSocketException

    for path in ("events/in", "events/out", "logs/out"):
        for protocols in ([], ["prefect"]):
            with pytest.raises(WebSocketException):
                first_reply(f"ws://127.0.0.1:{served.port}/api/{path}", protocols)


def test_mlflow_and_report_servers_accept_only_local_host_names(served: Served) -> None:
    """Contract: a page whose host name resolves to 127.0.0.1 reads nothing, and one of another site changes nothing."""
    api = "/api/2.0/mlflow/experiments"
    for host in FOREIGN_HOSTS:
        assert request(served.mlflow_port, "GET", f"{api}/search?max_results=1", host=host).status_code == 403
        assert request(served.report_port, "GET", "/report.html", host=host).status_code == 421
    for host in ("localhost", "127.0.0.1"):
        assert request(served.mlflow_port, "GET", f"{api}/search?max_results=1", host=host).status_code == 200
        assert request(served.report_port, "GET", "/dvc.yaml", host=host).status_code == 200
    wanted = {"title": "rl@search", "wanted": "stop"}
    for origin in ("https://attacker.example", "null"):
        assert request(served.report_port, "POST", "/live/request", origin=origin, json=wanted).status_code == 403
        made = request(served.mlflow_port, "POST", f"{api}/create", origin=origin, json={"name": "theirs"})
        assert made.status_code == 403
        read = request(served.mlflow_port, "GET", f"{api}/search?max_results=1", origin=origin)
        assert "access-control-allow-origin" not in read.headers
    assert request(served.report_port, "GET", "/").headers["location"] == "/live/"  # there is no report yet
    assert "Stop after this step" in request(served.report_port, "GET", "/live/").text
    assert request(served.report_port, "GET", "/../params.yaml").status_code == 404


@pytest.mark.slow
def test_prefect_cli_works_with_the_documented_password_settings(served: Served) -> None:
    """Contract: the line in docs/prefect.md is what `prefect` needs; without the password the server returns 401."""
    prefect = f"PREFECT_HOME=$PWD/.prefect PREFECT_API_URL=http://127.0.0.1:{served.port}/api"
    for given, works in ((f"{prefect} PREFECT_API_AUTH_STRING=$(cat .prefect/auth)", True), (prefect, False)):
        line = f"export {given}; {sys.executable} -m prefect deployment ls"
        done = subprocess.run(
            ["bash", "-c", line], cwd=served.root, env=served.environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) is works
        assert ("lifecycle-nightly" in done.stdout) is works
    assert "401" in done.stdout + done.stderr


@pytest.mark.slow
def test_flow_from_a_terminal_repeats_no_stage(served: Served) -> None:
    environment = {**served.environment, "PREFECT_API_URL": f"http://127.0.0.1:{served.port}/api"}
    command = [sys.executable, "-m", "flows.lifecycle", "--until", "join"]
    done = subprocess.run(command, cwd=served.root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    logged = [line.split(None, 2)[1:] for line in done.stdout.splitlines() if line.startswith("lifecycle: ")]
    assert [stage for stage, _ in logged] == ["make@a", "make@b", "join"]  # --until join: not `work`
    assert all(what.startswith("up to date: ") for _, what in logged)


@pytest.mark.slow
def test_change_starts_a_run_and_cancelling_it_ends_every_process(served: Served) -> None:
    """Editing params.yaml starts the pipeline; cancelling ends all its processes, whatever their session."""
    until(lambda: (served.root / ".bellwether" / "watch.json").exists(), "the first poll of the watcher")
    serving = {process.pid for process in served.processes()}
    set_behaviour(served.root, "hold")
    (served.root / "params.yaml").write_text("domains: [a, b]\nscale: 2\n")
    until(lambda: (served.root / "pids").exists(), "the stage is running")
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
def test_stage_that_fails_for_an_outside_reason_is_retried(served: Served) -> None:
    set_behaviour(served.root, "fail 1")
    run = served.run("lifecycle-on-change", retries=1, retry_delay_s=0)
    assert served.end_of(run)["type"] == "COMPLETED"
    assert (served.root / "attempts").read_text() == "xx"
    assert served.tasks(run)["work"]["run_count"] == 2
    assert states(served, run) == {"make@a": "UpToDate", "make@b": "UpToDate", "join": "UpToDate", "work": "Ran"}


@pytest.mark.slow
def test_stage_that_fails_on_its_parameters_is_not_retried(served: Served) -> None:
    set_behaviour(served.root, "bad")
    run = served.run("lifecycle-on-change", retries=3, retry_delay_s=0)
    state = served.end_of(run)
    assert state["type"] == "FAILED"
    assert "unknown key 'rl.step'. Did you mean 'steps'?" in state["message"]
    assert (served.root / "attempts").read_text() == "x"


def test_invalid_settings_are_rejected_before_anything_runs(served: Served) -> None:
    """The UI's form and the API enforce the ranges of the flow's pydantic model."""
    schema = served.deployment("lifecycle-nightly")["parameter_openapi_schema"]
    fields = schema["definitions"]["Settings"]["properties"]
    assert fields["retries"]["maximum"] == 10
    assert fields["until"]["anyOf"][0]["enum"] == ["make", "join", "work"]
    for wrong in ({"retries": 11}, {"jobs": 0}, {"retires": 1}, {"until": "rollouts"}):
        with pytest.raises(httpx.HTTPStatusError, match="409"):
            served.run("lifecycle-nightly", **wrong)


def test_gpu_and_checkout_allow_one_run_at_a_time(served: Served) -> None:
    assert served.api("GET", "/v2/concurrency_limits/gpu")["limit"] == 1
    queues = {item["name"]: item for item in served.api("POST", "/work_pools/bellwether/queues/filter", json={})}
    assert queues["checkout"]["concurrency_limit"] == 1
    for name in ("lifecycle-nightly", "lifecycle-on-change"):
        assert served.deployment(name)["work_queue_name"] == "checkout"


def test_stop_leaves_no_process_and_no_running_flow_run(served: Served) -> None:
    """Last in this module: it stops the shared server."""
    set_behaviour(served.root, "hold again")
    run = served.run("lifecycle-on-change")
    until(lambda: (served.root / "pids").exists(), "the stage is running")
    assert "stopped" in served.stop()
    assert served.process.wait(30) == 0
    assert not served.processes()
    with sqlite3.connect(served.root / ".prefect" / "prefect.db") as database:
        (state,) = database.execute("SELECT state_type FROM flow_run WHERE id = ?", (run,)).fetchone()
    assert state in ("CRASHED", "CANCELLED", "FAILED")
