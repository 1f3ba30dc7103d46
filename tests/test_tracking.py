"""Tracking never slows a stage down or stops it, and sends every event exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stages.params import parse_params
from stages.tracking import SpoolTracker, Tracker, flatten, open_tracker, run_header
from stages.tracking.follower import replay
from stages.tracking.sender import Sender, Server, create_database
from stages.tracking.spool import Spool, spools

ROOT = Path(__file__).resolve().parents[1]
PARAMS = {"domains": ["search"], "per_domain": {"search": {"rl": {"steps": 7}}}}
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database; making one takes seconds, copying it none."""
    folder = tmp_path_factory.mktemp("database")
    create_database(folder / "mlflow.db", folder / "artifacts")
    return folder / "mlflow.db"


@pytest.fixture
def root(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "DVC_ROOT", "LIFECYCLE_RUN_ID", "BELLWETHER_TRACKING"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mlflow.db").write_bytes(empty_database.read_bytes())
    return tmp_path


@pytest.fixture
def server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server(root)
    # MLflow writes the address it was given into the environment; the next test has its own.
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return found


def spooled(root: Path, stage: str = "rl", domain: str | None = "search") -> Spool:
    """A stage's spool with its header, and no follower."""
    header = run_header(root, stage, domain, parse_params(PARAMS))
    spool = Spool.create(root, header["title"])
    spool.append(header)
    return spool


def runs(server: Server) -> dict[str, Any]:
    found = {run.info.run_name: run for run in server.client.search_runs([server.experiment])}
    return {("lifecycle" if name.startswith("lifecycle") else name): run for name, run in found.items()}


def test_off_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLWETHER_TRACKING", "off")
    tracker = open_tracker(tmp_path, "rl", "search", parse_params(PARAMS))
    assert type(tracker) is Tracker
    tracker.metric("loss", 1.0, 1)
    tracker.close("FINISHED")
    assert not list(tmp_path.iterdir())


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2], "e": {}}


def test_a_stage_becomes_a_child_run_with_everything_it_said(root: Path, server: Server) -> None:
    """One parent run per lifecycle, one child per stage and domain with parameters, curves, files, tags, traces and the model."""
    spool = spooled(root)
    spool.append({"kind": "params", "values": {"extra": "1"}})
    spool.append({"kind": "tags", "values": {"in:data/models/sft": "00ff", "out:data/models/rl/search": "ff00"}})
    for step in range(2500):
        spool.append({"kind": "metric", "name": "loss", "value": 1 / (step + 1), "step": step})
    (root / "history.csv").write_text("step\n1\n")
    spool.append({"kind": "artifact", "path": str(root / "history.csv")})
    turns = [{"action": "go", "observation": "a room", "reward": 0.0}, {"action": "take", "observation": "taken", "reward": 1.0}]
    spool.append({"kind": "trace", "name": "task-1", "turns": turns, "tags": {"outcome": "success"}})
    (root / "merged").mkdir()
    (root / "merged" / "config.json").write_text("{}")
    spool.append({"kind": "model", "name": "bellwether", "path": str(root / "merged")})
    spool.append({"kind": "end", "status": "FINISHED"})

    assert Sender(server, spool).send()
    assert not spools(root)
    found = runs(server)
    child, parent = found["rl@search"], found["lifecycle"]
    assert child.info.status == parent.info.status == "FINISHED"
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.data.params["rl.steps"] == "7"
    assert child.data.params["extra"] == "1"
    assert {"git.commit", "git.dirty", "params.hash", "stage", "domain"} <= set(child.data.tags)
    assert child.data.tags["out:data/models/rl/search"] == "ff00"
    history = server.client.get_metric_history(child.info.run_id, "loss")
    assert [(point.step, point.value) for point in history[:2]] == [(0, 1.0), (1, 0.5)]
    assert len(history) == 2500
    assert {item.path for item in server.client.list_artifacts(child.info.run_id)} == {"history.csv", "merged"}
    traces = server.client.search_traces([server.experiment])
    assert [span.name for span in traces[0].data.spans] == ["task-1", "turn 0", "turn 1"]
    assert traces[0].info.trace_metadata["mlflow.sourceRun"] == child.info.run_id
    assert server.client.get_model_version_by_alias("bellwether", "champion").run_id == child.info.run_id


def test_what_was_interrupted_is_sent_again_and_counted_once(root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly once: a sender that dies after the server took an event, before that was noted, repeats it without a duplicate."""
    spool = spooled(root)
    for step in range(10):
        spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": step})
    spool.append({"kind": "trace", "name": "task-1", "turns": [{"action": "go"}], "tags": {}})
    spool.append({"kind": "metric", "name": "loss", "value": 0.25, "step": 10})

    confirm, calls = Sender._confirm, 0

    for fatal in (1, 2, 2):
        # Killed after the run was made, then after the first batch, then after the trace was sent.
        calls = 0

        def dies(self: Sender, offset: int, fatal: int = fatal) -> None:
            nonlocal calls
            calls += 1
            if calls == fatal:
                raise ConnectionError("killed here")
            confirm(self, offset)

        with monkeypatch.context() as patch:
            patch.setattr(Sender, "_confirm", dies)
            with pytest.raises(ConnectionError):
                Sender(server, spool).send()
    spool.append({"kind": "end", "status": "FINISHED"})
    assert Sender(server, spool).send()
    assert sorted(run.info.run_name.split()[0] for run in server.client.search_runs([server.experiment])) == [
        "lifecycle",
        "rl@search",
    ]
    assert len(server.client.get_metric_history(runs(server)["rl@search"].info.run_id, "loss")) == 11
    assert len(server.client.search_traces([server.experiment])) == 1


def test_stages_of_one_lifecycle_share_a_parent(root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent is found by commit and parameters, or by LIFECYCLE_RUN_ID where a flow sets it."""
    for stage, domain, lifecycle in (("sft", None, ""), ("rl", "search", ""), ("merge", None, "flow-1")):
        monkeypatch.setenv("LIFECYCLE_RUN_ID", lifecycle)
        spool = spooled(root, stage, domain)
        spool.append({"kind": "end", "status": "FINISHED"})
        Sender(server, spool).send()
    found = runs(server)
    parents = [found[name].data.tags["mlflow.parentRunId"] for name in ("sft", "rl@search", "merge")]
    assert parents[0] == parents[1] != parents[2]


def test_one_refused_event_costs_nothing_but_itself(root: Path, server: Server) -> None:
    spool = spooled(root)
    spool.append({"kind": "params", "values": {"rl.steps": "8"}})
    spool.append({"kind": "artifact", "path": str(root / "gone.csv")})
    spool.append({"kind": "metric", "name": "odd name @ 1", "value": 2.0, "step": 0})
    with spool.path.open("ab") as handle:
        handle.write(b'{"kind": "metr\n')
    spool.append({"kind": "end", "status": "FAILED"})
    assert Sender(server, spool).send()
    run = runs(server)["rl@search"]
    assert run.info.status == "FAILED"
    assert run.data.params["rl.steps"] == "7"
    assert run.data.metrics == {"odd name _ 1": 2.0}
    assert run.data.tags["tracking.rejected"] == "3"


def test_leftovers_of_dead_stages_are_sent_and_marked_killed(root: Path, server: Server) -> None:
    header = run_header(root, "rl", "search", parse_params(PARAMS))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    spool = Spool.create(root, "rl@search")
    spool.append({**header, "pid": dead.pid})
    spool.append({"kind": "metric", "name": "loss", "value": 1.0, "step": 0})
    with spool.path.open("ab") as handle:
        handle.write(b'{"kind": "cut off by the ki')
    living = spooled(root, "sft", None)
    assert replay(root, server) == 1
    assert [item.path for item in spools(root)] == [living.path]
    assert runs(server)["rl@search"].info.status == "KILLED"


STAGE = f"""
import os, sys, time
from pathlib import Path
from stages.params import parse_params
from stages.tracking import open_tracker
tracker = open_tracker(Path.cwd(), "rl", "search", parse_params({PARAMS!r}))
tracker.metric("loss", 1.0, 0)
print("started", flush=True)
if sys.argv[1] == "hang":
    time.sleep(60)
tracker.metric("loss", 0.5, 1)
tracker.close("FINISHED")
"""


def start_stage(root: Path, how: str, **environment: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", STAGE, how], cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def until(condition: Any, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_a_server_that_is_gone_stops_nothing_and_loses_nothing(root: Path) -> None:
    """A server that does not answer never stops a stage; what it missed is sent when it is back."""
    process = start_stage(root, "go", MLFLOW_TRACKING_URI=UNREACHABLE)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "tracking:" in stderr
    assert len(spools(root)) == 1

    def replay_with(**environment: str) -> int:
        command = [sys.executable, "-m", "stages.tracking", "--replay"]
        return subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, check=False
        ).returncode

    assert replay_with(MLFLOW_TRACKING_URI=UNREACHABLE) == 1
    assert len(spools(root)) == 1
    # The stage's follower holds on to the file for a few seconds more.
    assert until(lambda: replay_with() == 0)
    assert not spools(root)


def test_a_killed_stage_is_marked_killed_by_its_follower(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 leaves no run that stays RUNNING for ever."""
    process = start_stage(root, "hang")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert until(lambda: not spools(root))
    server = Server(root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = runs(server)["rl@search"]
    assert run.info.status == "KILLED"
    assert run.data.metrics["loss"] == 1.0
    assert run.data.metrics["system/system_memory_usage_megabytes"] > 0


def test_a_full_disk_is_reported_once_and_the_stage_goes_on(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = SpoolTracker.__new__(SpoolTracker)
    tracker.root, tracker.spool, tracker.broken = root, spooled(root), False

    def full(self: Spool, event: dict) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "append", full)
    tracker.metric("loss", 1.0, 0)
    tracker.metric("loss", 1.0, 1)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_the_header_holds_no_more_than_json(root: Path) -> None:
    header = run_header(root, "merge", None, parse_params(PARAMS))
    assert json.loads(json.dumps(header)) == header
    assert header["params"]["merge.method"] == "ram_plus"
    assert "rl.steps" not in header["params"]


def test_a_database_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it makes MLflow's tables leaves nothing that later runs would stumble over."""
    from mlflow.store.tracking import sqlalchemy_store

    def killed(uri: str, artifacts: str) -> None:
        Path(uri.removeprefix("sqlite:///")).write_bytes(b"half a database")
        raise ConnectionError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(sqlalchemy_store, "SqlAlchemyStore", killed)
        with pytest.raises(ConnectionError):
            create_database(tmp_path / "mlflow.db", tmp_path / "artifacts")
    assert not (tmp_path / "mlflow.db").exists()
    create_database(tmp_path / "mlflow.db", tmp_path / "artifacts")
    assert [path.name for path in tmp_path.glob("mlflow*")] == ["mlflow.db"]
