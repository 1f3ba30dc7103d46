"""Tracking never slows a stage down or stops it, and sends every event exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from spooling import EPISODE, PARAMS, ROOT, attach, runs, spooled, start_stage, until

from stages.params import parse_params
from stages.runtime.tracker import Tracker
from stages.tracking import SpoolTracker, flatten, open_tracker
from stages.tracking.episodes import trace_of
from stages.tracking.follower import Sampler
from stages.tracking.header import Lifecycle
from stages.tracking.sender import Sender
from stages.tracking.server import Server, create_database
from stages.tracking.spool import Spool, spools
from stages.tracking.sweep import replay

UNREACHABLE = "http://127.0.0.1:9"


def test_tracking_off_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLWETHER_TRACKING", "off")
    tracker = open_tracker(tmp_path, "rl", "search", parse_params(PARAMS))
    assert type(tracker) is Tracker
    tracker.metric("loss", 1.0, 1)
    tracker.close("FINISHED")
    assert not list(tmp_path.iterdir())


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2], "e": {}}


def test_stage_becomes_a_child_run_with_all_its_events(root: Path, server: Server) -> None:
    """One parent run per lifecycle, one child per stage and domain with parameters, curves, files, tags, datasets and traces."""
    spool = spooled(root)
    spool.append({"kind": "params", "values": {"extra": "1"}})
    spool.append({"kind": "tags", "values": {"in:data/models/sft": "00ff", "out:data/models/rl/search": "ff00"}})
    dataset = {"name": "data/curated/search", "digest": "0123456789abcdef0123456789abcdef.dir", "profile": {"files": 3}}
    spool.append({"kind": "datasets", "context": "rl@search", "datasets": [dataset]})
    for step in range(2500):
        spool.append({"kind": "metric", "name": "loss", "value": 1 / (step + 1), "step": step})
    attach(spool, {"kind": "artifact"}, "history.csv", "step\n1\n")
    spool.append({"kind": "trace", **trace_of(EPISODE, "rl step 1")})
    spool.append({"kind": "headline", "values": {"search_sft": 0.5}})
    spool.append({"kind": "end", "status": "FINISHED"})

    assert Sender(server, spool).send()
    assert not list(spool.path.parent.glob(f"{spool.path.stem}*"))
    found = runs(server)
    child, parent = found["rl@search"], found["lifecycle"]
    assert child.info.status == parent.info.status == "FINISHED"
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.data.metrics == {"search_sft": 0.5}
    assert child.data.params["rl.steps"] == "7"
    assert child.data.params["extra"] == "1"
    assert {"git.commit", "git.dirty", "params.hash", "stage", "domain"} <= set(child.data.tags)
    assert child.data.tags["out:data/models/rl/search"] == "ff00"
    given = child.inputs.dataset_inputs[0]
    assert (given.dataset.name, given.dataset.digest, given.tags[0].value) == (dataset["name"], dataset["digest"], "rl@search")
    history = server.client.get_metric_history(child.info.run_id, "loss")
    assert [(point.step, point.value) for point in history[:2]] == [(0, 1.0), (1, 0.5)]
    assert len(history) == 2500
    assert {item.path for item in server.client.list_artifacts(child.info.run_id)} == {"history.csv"}


def test_trace_shows_turns_tool_calls_rewards_and_advantages(root: Path, server: Server) -> None:
    """Per turn: the policy's input, action, log-probability and mean advantage, and the environment's response."""
    spool = spooled(root)
    spool.append({"kind": "trace", **trace_of(EPISODE, "rl step 1")})
    spool.append({"kind": "end", "status": "FINISHED"})
    assert Sender(server, spool).send()
    trace = server.client.search_traces(locations=[server.experiment])[0]
    assert trace.info.trace_metadata["mlflow.sourceRun"] == runs(server)["rl@search"].info.run_id
    names = ["task-1", "turn 1: go", "turn 1: environment", "turn 2: take", "turn 2: environment"]
    spans = {span.name: span for span in trace.data.spans}
    assert sorted(spans) == sorted(names)
    policy, tool = spans["turn 1: go"], spans["turn 1: environment"]
    assert policy.outputs["messages"][0]["content"] == "go"
    assert (policy.attributes["logprob"], policy.attributes["advantage"]) == (-1.5, 1.0)
    assert tool.inputs == {"action": "go"}
    assert tool.outputs == {"observation": "a room", "reward": 0.0, "accepted": True, "cost": 1.0, "advantage": 1.0}
    assert spans["turn 2: take"].inputs["messages"][0]["content"] == "a room"
    assert {item.name: item.value for item in trace.info.assessments} == {"reward": 1.0, "success": True, "format": 0.5}
    address = "http://127.0.0.1:5001/episodes/index.html#source=rl+step+1&episode=e1"
    assert trace.info.tags["viewer"] == address
    assert {item.rationale for item in trace.info.assessments} == {f"[the episode in the viewer]({address})"}


def test_interrupted_sending_repeats_without_duplicates(root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly once: if a sender dies after the server took an event, before that is noted, it is repeated without effect."""
    spool = spooled(root)
    for step in range(10):
        spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": step})
    spool.append({"kind": "trace", **trace_of(EPISODE, "rl step 1")})
    spool.append({"kind": "metric", "name": "loss", "value": 0.25, "step": 10})

    confirm, calls = Sender._confirm, 0

    for fatal in (1, 2, 2):
        # Killed after the run was created, then after the first batch, then after the trace was sent.
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
    traces = server.client.search_traces(locations=[server.experiment])
    assert [len(trace.info.assessments) for trace in traces] == [3]


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


def test_rejected_event_does_not_affect_others(root: Path, server: Server) -> None:
    spool = spooled(root)
    spool.append({"kind": "params", "values": {"rl.steps": "8"}})
    spool.append({"kind": "artifact", "files": "gone"})
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
    header = Lifecycle.now(root, parse_params(PARAMS)).header("rl", "search")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    spool = Spool.create(root, {**header, "pid": dead.pid})
    spool.append({"kind": "metric", "name": "loss", "value": 1.0, "step": 0})
    with spool.path.open("ab") as handle:
        handle.write(b'{"kind": "cut off by the ki')
    alive = spooled(root, "sft", None)
    assert replay(root, server) == 1
    assert [item.path for item in spools(root)] == [alive.path]
    assert runs(server)["rl@search"].info.status == "KILLED"


def test_spool_file_appears_with_its_header(root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay while a stage starts must not take its file for that of a dead stage."""
    rename, seen = os.replace, []

    def late(source: Path, target: Path) -> None:
        seen.append(([item.path for item in spools(root)], replay(root, server)))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("stages.tracking.spool.os.replace", late)
        spool = spooled(root, "report", None)
    assert seen == [([], 0)]
    assert replay(root, server) == 0
    header = spool.header()
    assert header is not None
    assert header["title"] == "report"


def test_follower_of_an_already_sent_spool_leaves_no_files(root: Path) -> None:
    spool = spooled(root, "report", None)
    spool.remove()
    command = [sys.executable, "-m", "stages.tracking", "--follow", str(spool.path)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not [path for path in spool.path.parent.iterdir() if path.is_file()]


@pytest.mark.slow
def test_unreachable_server_neither_stops_a_stage_nor_loses_events(root: Path) -> None:
    """Events for a server that does not answer are sent when it is back."""
    process = start_stage(root, "wait", MLFLOW_TRACKING_URI=UNREACHABLE)
    assert until(lambda: any(spool.load_sent().error for spool in spools(root)))
    _, stderr = process.communicate("\n", timeout=120)
    assert process.returncode == 0
    assert "tracking: some events were not sent" in stderr
    assert len(spools(root)) == 1

    def replay_with(**environment: str) -> int:
        command = [sys.executable, "-m", "stages.tracking", "--replay"]
        return subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, check=False
        ).returncode

    assert replay_with(MLFLOW_TRACKING_URI=UNREACHABLE) == 1
    assert len(spools(root)) == 1
    # The stage's follower holds the file for a few more seconds.
    assert until(lambda: replay_with() == 0)
    assert not spools(root)


def test_killed_stage_is_marked_killed_by_its_follower(root: Path) -> None:
    """kill -9 leaves no run that stays RUNNING."""
    process = start_stage(root, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    (spool,) = spools(root)
    assert until(lambda: b"system/" in spool.path.read_bytes()), "the follower samples the stage"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert until(lambda: not spools(root))
    run = runs(Server(root))["rl@search"]
    assert run.info.status == "KILLED"
    assert run.data.metrics["loss"] == 1.0
    assert run.data.metrics["system/system_memory_usage_megabytes"] > 0


TWO_GPUS = SimpleNamespace(
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=int,
    nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=50 + gpu),
    nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=2_000_000_000),
    nvmlDeviceGetPowerUsage=lambda gpu: 300_500,
)
"""NVIDIA's library on a machine with two GPUs."""


def test_system_metrics_of_the_stage_and_of_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", TWO_GPUS)
    values = Sampler(os.getppid(), tmp_path).sample()
    assert values["system/gpu_1_utilization_percentage"] == 51.0
    assert values["system/gpu_0_memory_usage_megabytes"] == 2000.0
    assert values["system/gpu_0_power_usage_watts"] == 300.5
    assert values["system/system_memory_usage_megabytes"] > 1
    assert values["system/disk_available_megabytes"] > 0


def test_without_a_gpu_there_are_no_gpu_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not [name for name in Sampler(os.getppid(), tmp_path).sample() if "gpu" in name]


def test_full_disk_is_reported_once_and_the_stage_continues(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = SpoolTracker(root, spooled(root), "rl@search", followers=0)

    def full(self: Spool, event: dict) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "append", full)
    tracker.metric("loss", 1.0, 0)
    tracker.metric("loss", 1.0, 1)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_header_is_plain_json(root: Path) -> None:
    header = Lifecycle.now(root, parse_params(PARAMS)).header("merge", None)
    assert json.loads(json.dumps(header)) == header
    assert header["params"]["merge.method"] == "ram_plus"
    assert "rl.steps" not in header["params"]


def test_database_is_created_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed while it creates MLflow's tables leaves nothing that breaks later runs."""
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


def test_artifacts_are_copied_and_missing_ones_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An outage may outlast the next run, which overwrites the same files."""
    tracker = SpoolTracker(root, spooled(root), "rl@search", followers=0)
    path = root / "report.json"
    path.write_text("first")
    tracker.artifact(path)
    path.write_text("second")
    tracker.artifact(root / "gone.json")
    assert "gone.json" in capsys.readouterr().err
    events, _ = tracker.spool.read(0)
    (event,) = [event for _, event in events if event["kind"] == "artifact"]
    assert (tracker.spool.files_path / event["files"] / "report.json").read_text() == "first"


CONNECT = """
import sys
from pathlib import Path
from stages.tracking.server import Server
Server(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_concurrent_stages_create_one_database(tmp_path: Path) -> None:
    """Contract: only one process creates MLflow's tables; two at once would leave them permanently incomplete."""
    command = [sys.executable, "-c", CONNECT, str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    both = [subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    logs = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], logs
    assert sum(text.count("Creating initial MLflow database tables") for text in logs) == 1
