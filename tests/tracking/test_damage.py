"""Damaged files lose at most their own content, and a healthy run prints nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from spooling import EPISODE, attach, runs, spooled, start_stage, until

from stages.runtime.files import locked
from stages.tracking import SpoolTracker
from stages.tracking.episodes import trace_of
from stages.tracking.follower import Followed, Follower
from stages.tracking.sender import Sender
from stages.tracking.server import Server
from stages.tracking.spool import MAX_READ, Sent, Spool, follower_lock, spools
from stages.tracking.sweep import replay

DAMAGE = [b"", b"\0" * 80, b'{"run_id": "ab', b"\xff\xfe", b"[]", b'{"offset": "12"}', b'{"unknown": 1}', b'{"offset": -1}']
DAMAGE += [json.dumps({"run_id": "r", "offset": 10**9}).encode(), json.dumps({"run_id": "", "offset": 5}).encode()]


def finished(root: Path, stage: str = "rl", domain: str | None = "search") -> Spool:
    spool = spooled(root, stage, domain)
    spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": 0})
    spool.append({"kind": "end", "status": "FINISHED"})
    return spool


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_state_file_counts_as_nothing_sent(root: Path, damage: bytes) -> None:
    spool = finished(root)
    spool.state_path.write_bytes(damage)
    assert spool.load_sent() == Sent(again=spool.path.stat().st_size)


def test_resending_after_damage_makes_no_duplicates(root: Path, server: Server) -> None:
    """Contract: a damaged `.state` file blocks nothing, and what the server already has is not created again."""
    spool = spooled(root)
    attach(spool, {"kind": "artifact"}, "history.csv", "step\n1\n")
    for _ in range(2):
        spool.append({"kind": "trace", **trace_of(EPISODE, "rl step 1")})
    spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": 0})
    assert not Sender(server, spool).send()
    spool.state_path.write_bytes(b"\0" * 80)
    spool.append({"kind": "end", "status": "FINISHED"})
    other = finished(root, "sft", None)
    other.state_path.write_bytes(b"{")
    # As `python -m stages.tracking` does once both stages have ended.
    assert replay(root, server) == 2
    assert not spools(root)
    found = runs(server)
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert len(server.client.search_runs([server.experiment])) == 3
    assert len(server.client.get_metric_history(found["rl@search"].info.run_id, "loss")) == 1
    traces = server.client.search_traces(locations=[server.experiment])
    expected = len(trace_of(EPISODE, "rl step 1")["scores"]) + 2  # reward and success
    assert [len(trace.info.assessments) for trace in traces] == [expected, expected]


def test_follower_survives_damaged_state_and_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = finished(root)
    follower, run = Follower(root), Followed(root, spool, spool.header() or {})

    def full(self: Spool, sent: Sent) -> None:
        raise OSError(28, "No space left on device")

    spool.state_path.write_bytes(b"{")
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "save_sent", full)
        assert not follower.serve(run)
        assert run.failures == 1
    run.next_send = 0.0
    assert follower.serve(run), "not sent although there is space again"
    assert not spools(root)


def test_run_that_ends_before_its_follower_starts_is_sent(root: Path) -> None:
    finished(root)
    follower = Follower(root)
    follower.leave()
    assert follower.run() == 0
    assert not spools(root)


def test_event_larger_than_a_read_is_sent(root: Path, server: Server) -> None:
    """Contract: events of any size leave the spool, and a large one does not block those after it."""
    spool = spooled(root)
    large = trace_of({**EPISODE, "messages": [{"role": "user", "content": "x" * (MAX_READ + 100_000)}]}, "rl step 1")
    spool.append({"kind": "trace", **large})
    spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": 0})
    spool.append({"kind": "end", "status": "FINISHED"})
    assert Sender(server, spool).send()
    run = runs(server)["rl@search"]
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 0.5})
    assert len(server.client.search_traces(locations=[server.experiment])) == 1


def test_damaged_events_are_skipped(root: Path, server: Server) -> None:
    """A line may be valid JSON but no event; a carriage return does not end a line."""
    spool = spooled(root)
    t = b'{"t": 1, "kind": '
    damaged = [b"5", b"null", b'"metric"', b"{}", t + b'"metric"}', t + b'"metric", "name": "a", "value": "b", "step": 0}']
    damaged += [t + b'"params", "values": [1]}', t + b'"tags", "values": {"a": 1}}', t + b'"no such kind"}', b"a\rb"]
    with spool.path.open("ab") as handle:
        handle.write(b"\n".join(damaged) + b"\n")
    spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": 0})
    spool.append({"kind": "end", "status": "FINISHED"})
    assert Sender(server, spool).send()
    run = runs(server)["rl@search"]
    assert run.data.metrics == {"loss": 0.5}
    assert run.data.tags["tracking.rejected"] == str(len(damaged))


@pytest.mark.parametrize("header", [b"{", b"5", b'{"kind": "run", "t": 1}'])
def test_spool_with_damaged_header_is_set_aside(
    root: Path, server: Server, header: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is kept and reported, and does not block other spools."""
    broken = finished(root)
    lines = broken.path.read_bytes().split(b"\n")
    broken.path.write_bytes(b"\n".join([header, *lines[1:]]))
    whole = finished(root, "sft", None)
    assert replay(root, server) == 1
    assert not whole.path.exists()
    assert not spools(root)
    assert broken.path.with_suffix(".damaged").read_bytes().split(b"\n")[1:] == lines[1:]
    assert "first line is damaged" in capsys.readouterr().out


def test_unsendable_spool_does_not_block_others(root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = finished(root), finished(root, "sft", None)
    send = Sender.send

    def refuses(self: Sender) -> bool:
        if self.spool.path == first.path:
            raise PermissionError(13, "Permission denied")
        return send(self)

    monkeypatch.setattr(Sender, "send", refuses)
    assert replay(root, server) == 1
    assert [spool.path for spool in spools(root)] == [first.path]
    assert not second.path.exists()


def test_healthy_run_prints_nothing(root: Path) -> None:
    """Contract: at the end of a stage, tracking prints only what somebody must act on."""
    process = start_stage(root, "go")
    out, stderr = process.communicate(timeout=120)
    assert (process.returncode, out, stderr) == (0, "started\n", "")
    assert until(lambda: not spools(root))


def test_unsent_events_of_earlier_stages_are_warned_about(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = SpoolTracker(root, spooled(root), "rl@search", followers=0)
    with locked(follower_lock(root), wait=False):  # as a follower does
        tracker._warn_if_unsent()
        assert capsys.readouterr().err == ""
        spooled(root, "sft", None).save_error("ConnectionError: refused")
        tracker._warn_if_unsent()
        assert re.search(r"not sent \(ConnectionError: refused\).*python -m stages.tracking", capsys.readouterr().err)
        tracker.spool.save_sent(Sent("run", 10))
        tracker._warn_if_unsent()
        assert capsys.readouterr().err == "", "the server answers again, and the follower sends what is left"
    tracker._warn_if_unsent()
    assert "see .bellwether/tracking/follower.log" in capsys.readouterr().err, "nobody sends it"


def test_run_whose_sender_is_killed_before_it_removes_the_spool_is_removed_later(
    root: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = finished(root)

    def killed(self: Spool) -> None:
        raise ConnectionError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "remove", killed)
        with pytest.raises(ConnectionError):
            Sender(server, spool).send()
    assert replay(root, server) == 1
    assert not spools(root)
    assert {run.info.status for run in runs(server).values()} == {"FINISHED"}


def test_clock_that_is_set_kills_no_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's start times of processes change with the clock, as after the sleep of a virtual machine."""
    spool, created = spooled(root), psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) + 3600)
    run = Followed(root, spool, spool.header() or {})
    run.look()
    assert run.exited_at is None
    assert not spool.ended()


def test_machine_without_processes_or_space_to_spare_fails_no_stage(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = SpoolTracker(root, spooled(root), "evaluate", followers=0)
    (root / "merged").mkdir()
    (root / "rows.parquet").write_text("rows")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def busy(*_: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy2", full)
        tracker.register_model(root / "merged", root / "rows.parquet", {})
    assert "cannot register merged: [Errno 28] No space left on device; skipped" in capsys.readouterr().err
    tracker.broken, tracker.followers = True, 1  # the last events could not be written
    monkeypatch.setattr("subprocess.Popen", busy)
    tracker.close("FINISHED")
    assert "Resource temporarily unavailable" in capsys.readouterr().err
