"""One parent run per lifecycle, child runs for executed and cached stages, and no run that stays RUNNING."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from spooling import PARAMS, ROOT, runs, spooled, start_stage, until

from stages.params import parse_params
from stages.runtime.lineage import Locked
from stages.tracking.__main__ import add_not_executed, parse_states
from stages.tracking.cached import add_cached_runs, add_upstream_runs, recorded
from stages.tracking.header import Lifecycle
from stages.tracking.sender import Sender
from stages.tracking.server import Server
from stages.tracking.spool import is_followed, spools
from stages.tracking.sweep import replay, sweep

LOCK = """
schema: '2.0'
stages:
  curate@search: {cmd: x, deps: [{path: raw, md5: aa}], outs: [{path: data/curated/search, md5: bb.dir}]}
  sft: {cmd: x, deps: [{path: data/curated, md5: cc.dir}], outs: [{path: data/models/sft, md5: dd.dir}]}
  merge: {cmd: x, deps: [{path: data/models/rl, md5: ee.dir}], outs: [{path: data/models/merged, md5: ff.dir}]}
"""
DVC_YAML = "stages: {rl: {cmd: x, deps: ['data/curated/${item.domain}', data/models/sft]}}"


def now(root: Path) -> Lifecycle:
    return Lifecycle.now(root, parse_params(PARAMS))


def finish(server: Server, stage: str, status: str = "FINISHED") -> None:
    spool = spooled(server.root, stage, None)
    spool.append({"kind": "end", "status": status})
    assert Sender(server, spool).send()


def test_cached_upstream_stages_get_child_runs(root: Path, server: Server) -> None:
    """Their child runs have state and hashes, once per lifecycle; downstream stages get none."""
    (root / "dvc.lock").write_text(LOCK)
    (root / "dvc.yaml").write_text(DVC_YAML)
    assert add_upstream_runs(now(root), root, "rl", "search") == ["curate@search", "sft"]
    assert add_upstream_runs(now(root), root, "rl", "search") == []
    assert replay(root, server) == 2
    found = runs(server)
    assert set(found) == {"lifecycle", "curate@search", "sft"}
    run = found["curate@search"]
    assert run.info.status == "FINISHED"
    assert run.data.tags["dvc.state"] == "cached"
    assert run.data.tags["in:raw"] == "aa"
    assert run.data.tags["out:data/curated/search"] == "bb.dir"
    assert run.data.tags["mlflow.parentRunId"] == found["lifecycle"].info.run_id


def test_executed_stage_is_not_recorded_as_cached(root: Path, server: Server) -> None:
    """Without local notes the server is asked: a cached stage has one run per lifecycle, updated with its exact state."""
    finish(server, "sft")
    add_cached_runs(now(root), [Locked("sft"), Locked("merge")], {})
    add_cached_runs(now(root), [Locked("merge")], {"merge": "restored"})
    replay(root, server)
    found = [(run.info.run_name, run.data.tags["dvc.state"]) for run in server.children(runs(server)["lifecycle"].info.run_id)]
    assert sorted(found) == [("merge", "restored"), ("sft", "ran")]
    assert recorded(now(root)) == {"sft", "merge"}


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ([("sft", "FINISHED"), ("merge", "FINISHED")], "FINISHED"),
        ([("sft", "FAILED"), ("merge", "FINISHED")], "FAILED"),
        ([("sft", "FAILED"), ("sft", "FINISHED")], "FINISHED"),
        ([("sft", "FAILED"), ("merge", "KILLED")], "KILLED"),
    ],
)
def test_lifecycle_status_follows_the_last_run_of_each_stage(
    root: Path, server: Server, ended: list[tuple[str, str]], expected: str
) -> None:
    for stage, status in ended:
        finish(server, stage, status)
    assert runs(server)["lifecycle"].info.status == expected


def test_lifecycle_is_running_while_one_of_its_stages_is(root: Path, server: Server) -> None:
    """With domains in parallel, the first stage to end does not end the lifecycle."""
    first, second = spooled(root, "sft", None), spooled(root, "merge", None)
    Sender(server, first).send()
    Sender(server, second).send()
    first.append({"kind": "end", "status": "FINISHED"})
    Sender(server, first).send()
    assert runs(server)["lifecycle"].info.status == "RUNNING"
    second.append({"kind": "end", "status": "FINISHED"})
    Sender(server, second).send()
    assert runs(server)["lifecycle"].info.status == "FINISHED"


@pytest.mark.parametrize(("name", "value"), [("LIFECYCLE_RUN_ID", "flow-1"), ("DVC_EXP_NAME", "silky-gum")])
def test_flow_runs_and_experiments_have_their_own_lifecycles(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    plain = now(root)
    assert now(root).key == plain.key
    monkeypatch.setenv(name, value)
    assert now(root).key != plain.key
    assert (now(root).tags.get("dvc.exp"), now(root).name == "lifecycle silky-gum") == (
        ("silky-gum", True) if name == "DVC_EXP_NAME" else (None, False)
    )


def test_sweep_ends_only_runs_of_dead_local_processes(root: Path, server: Server, tmp_path: Path) -> None:
    """A killed process's run never stays RUNNING, even if its spool was deleted; runs of other machines and checkouts do."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = {"host": socket.gethostname(), "checkout": str(root), "pid": str(gone.pid)}
    other = {"host": "elsewhere"}
    for name, tags in {
        "dead": here,
        "alive": {**here, "pid": str(os.getpid())},
        "other machine": {**here, **other},
        "other checkout": {**here, "checkout": str(ROOT)},
    }.items():
        parent = server._create(1, f"lifecycle {name}", {**here, **tags, "git.commit": "c", "lifecycle": name})
        server.client.update_run(parent, status="RUNNING")
        started = psutil.Process().create_time() * 1000 + 10
        server._create(int(started), name, {**tags, "git.commit": "c", "mlflow.parentRunId": parent})
    assert sweep(server) == ["dead"]
    found = {run.info.run_name: run.info.status for run in server.client.search_runs([server.experiment])}
    assert found["dead"] == found["lifecycle dead"] == "KILLED"
    assert {found[name] for name in found if "dead" not in name} == {"RUNNING"}


def follower_of(stage: subprocess.Popen) -> psutil.Process:
    """The stage's follower; its command line is empty until its program is loaded."""

    def found() -> list[psutil.Process]:
        return [child for child in psutil.Process(stage.pid).children() if "--follow" in child.cmdline()]

    assert until(lambda: bool(found()))
    return found()[0]


def test_killed_follower_is_replaced(root: Path, server: Server) -> None:
    stage = start_stage(root, "wait")
    assert stage.stdout is not None
    assert stage.stdin is not None
    assert stage.stdout.readline() == "started\n"
    follower = follower_of(stage)
    follower.send_signal(signal.SIGKILL)
    assert until(lambda: follower.status() == psutil.STATUS_ZOMBIE)
    stage.stdin.write("go on\n")
    stage.stdin.close()
    stage.wait(240)
    assert until(lambda: not spools(root))
    run = runs(server)["rl@search"]
    assert run.info.status == "FINISHED"
    assert [point.value for point in server.client.get_metric_history(run.info.run_id, "loss")] == [1.0, 0.5]


def test_one_follower_serves_all_stages_of_a_checkout(root: Path, server: Server) -> None:
    """Contract: it notices the death of any, and another server's runs have a follower of their own."""
    first = start_stage(root, "wait")
    assert first.stdout is not None
    assert first.stdout.readline() == "started\n"
    follower = follower_of(first)
    assert until(lambda: is_followed(root))
    second, elsewhere = start_stage(root, "wait"), start_stage(root, "wait", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    for stage in (second, elsewhere):
        assert stage.stdout is not None
        assert stage.stdout.readline() == "started\n"
    assert follower_of(elsewhere).pid != follower.pid
    assert not psutil.Process(second.pid).children()
    assert until(lambda: len(statuses(server)) == 2)
    second.kill()
    second.wait()
    assert until(lambda: statuses(server) == ["KILLED", "RUNNING"])
    assert first.stdin is not None
    first.stdin.close()
    first.wait(240)
    assert until(lambda: statuses(server) == ["FINISHED", "KILLED"])
    elsewhere.kill()
    elsewhere.wait()
    assert until(lambda: len(spools(root)) == 1), "the other server's"
    third = start_stage(root, "go")
    assert third.wait(240) == 0
    assert until(lambda: statuses(server) == ["FINISHED", "FINISHED", "KILLED"])
    follower.terminate()
    assert until(lambda: not follower.is_running()), "it waits for further stages no longer"


def statuses(server: Server) -> list[str]:
    """Of all stage runs, sorted."""
    found = server.client.search_runs([server.experiment])
    return sorted(run.info.status for run in found if not run.info.run_name.startswith("lifecycle"))


@pytest.mark.slow
def test_run_of_killed_stage_and_follower_is_marked_killed_later(root: Path, server: Server) -> None:
    """kill -9 of both: the run stays RUNNING until `python -m stages.tracking`, or the next stage, marks it KILLED."""
    stage = start_stage(root, "wait")
    assert stage.stdout is not None
    assert stage.stdout.readline() == "started\n"
    follower = follower_of(stage)
    assert until(lambda: "rl@search" in runs(server))
    for victim in (follower.pid, stage.pid):
        os.kill(victim, signal.SIGKILL)
    stage.wait()
    assert runs(server)["rl@search"].info.status == "RUNNING"
    command = [sys.executable, "-m", "stages.tracking", "--replay"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sent 1 of 1 runs" in done.stdout
    assert {run.info.status for run in runs(server).values()} == {"KILLED"}


def test_stage_states_from_a_flow_become_child_runs(root: Path, server: Server) -> None:
    """`--state` from a flow: skipped stages get child runs with their state; those that ran have their own runs."""
    (root / "dvc.lock").write_text(LOCK)
    (root / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    states = parse_states(["sft=unchanged", "merge=restored", "rl@search=ran", "gone=restored"])
    assert add_not_executed(root, states) == ["sft", "merge"]
    replay(root, server)
    found = {name: run.data.tags.get("dvc.state") for name, run in runs(server).items() if name != "lifecycle"}
    assert found == {"sft": "unchanged", "merge": "restored"}
    with pytest.raises(ValueError, match=r"write STAGE=STATE.*ran, restored, unchanged, cached"):
        parse_states(["merge=skipped"])


def test_without_a_flow_dvc_status_gives_the_cached_stages(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that `dvc status` calls changed, and those already recorded, are left out."""
    (root / "dvc.lock").write_text(LOCK)
    (root / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    monkeypatch.setattr("stages.tracking.__main__.changed_stages", lambda root: {"merge"})
    assert add_not_executed(root, {}) == ["curate@search", "sft"]
    assert add_not_executed(root, {}) == []
    monkeypatch.setattr("stages.tracking.__main__.changed_stages", lambda root: None)
    monkeypatch.setenv("LIFECYCLE_RUN_ID", "another")
    assert add_not_executed(root, {}) == []
