"""What is damaged on the disk costs itself at most, and a healthy run is not commented on."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from spooling import EPISODE, attach, runs, spooled, start_stage, until

from stages.tracking import SpoolTracker
from stages.tracking.episodes import trace_of
from stages.tracking.follower import Follower
from stages.tracking.sender import Sender
from stages.tracking.server import Server
from stages.tracking.spool import MAX_READ, Sent, Spool, spools
from stages.tracking.sweep import replay

DAMAGE = [b"", b"\0" * 80, b'{"run_id": "ab', b"\xff\xfe", b"[]", b'{"offset": "12"}', b'{"unknown": 1}', b'{"offset": -1}']
DAMAGE += [json.dumps({"run_id": "r", "offset": 10**9}).encode(), json.dumps({"run_id": "", "offset": 5}).encode()]


def finished(root: Path, stage: str = "rl", domain: str | None = "search") -> Spool:
    spool = spooled(root, stage, domain)
    spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": 0})
    spool.append({"kind": "end", "status": "FINISHED"})
    return spool


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_of_what_was_sent_counts_as_none(root: Path, damage: bytes) -> None:
    spool = finished(root)
    spool.state_path.write_bytes(damage)
    assert spool.load_sent() == Sent(again=spool.path.stat().st_size)


def test_all_is_sent_again_and_nothing_is_there_twice(root: Path, server: Server) -> None:
    """Contract: a damaged `.state` file blocks nothing, and what the server has already is not made a second time."""
    spool = spooled(root)
    attach(spool, {"kind": "artifact"}, "history.csv", "step\n1\n")
    for _ in range(2):
        spool.append({"kind": "trace", **trace_of(EPISODE)})
    spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": 0})
    assert not Sender(server, spool).send()
    spool.state_path.write_bytes(b"\0" * 80)
    spool.append({"kind": "end", "status": "FINISHED"})
    other = finished(root, "sft", None)
    other.state_path.write_bytes(b"{")
    # As `python -m stages.tracking` does it once the stages are gone: both have said their end.
    assert replay(root, server) == 2
    assert not spools(root)
    found = runs(server)
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert len(server.client.search_runs([server.experiment])) == 3
    assert len(server.client.get_metric_history(found["rl@search"].info.run_id, "loss")) == 1
    traces = server.client.search_traces(locations=[server.experiment])
    assert [len(trace.info.assessments) for trace in traces] == [2, 2]


def test_a_follower_outlives_a_damaged_record_and_a_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = finished(root)
    follower = Follower(root, spool, os.getppid())

    def full(self: Spool, sent: Sent) -> None:
        raise OSError(28, "No space left on device")

    spool.state_path.write_bytes(b"{")
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "save_sent", full)
        assert not follower._send()
        assert follower.failures == 1
    assert follower._send(), "there is room again: all is sent"
    assert not spools(root)


def test_a_stage_that_exits_before_its_follower_has_started_is_sent(root: Path) -> None:
    spool = finished(root)
    stage = subprocess.Popen(["true"])
    stage.wait()
    assert Follower(root, spool, stage.pid).run() == 0
    assert not spools(root)


def test_an_event_of_any_size_is_sent(root: Path, server: Server) -> None:
    """Contract: whatever a stage says leaves the spool; what follows a large event is not held back by it."""
    spool = spooled(root)
    large = trace_of({**EPISODE, "messages": [{"role": "user", "content": "x" * (MAX_READ + 100_000)}]})
    spool.append({"kind": "trace", **large})
    spool.append({"kind": "metric", "name": "loss", "value": 0.5, "step": 0})
    spool.append({"kind": "end", "status": "FINISHED"})
    assert Sender(server, spool).send()
    run = runs(server)["rl@search"]
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 0.5})
    assert len(server.client.search_traces(locations=[server.experiment])) == 1


def test_damaged_events_are_passed_over(root: Path, server: Server) -> None:
    """A line may be valid JSON and no event all the same; a carriage return ends no line."""
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
def test_a_file_whose_first_line_is_damaged_is_set_aside(
    root: Path, server: Server, header: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds nobody back, is not thrown away, and is told of."""
    broken = finished(root)
    lines = broken.path.read_bytes().split(b"\n")
    broken.path.write_bytes(b"\n".join([header, *lines[1:]]))
    whole = finished(root, "sft", None)
    assert replay(root, server) == 1
    assert not whole.path.exists()
    assert not spools(root)
    assert broken.path.with_suffix(".damaged").read_bytes().split(b"\n")[1:] == lines[1:]
    assert "first line is damaged" in capsys.readouterr().out


def test_a_file_that_can_not_be_sent_keeps_no_other_back(root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_healthy_run_ends_without_a_word(root: Path) -> None:
    """Contract: tracking says something at the end of a stage only if there is something that a person should do."""
    process = start_stage(root, "go")
    out, stderr = process.communicate(timeout=120)
    assert (process.returncode, out, stderr) == (0, "started\n", "")
    assert until(lambda: not spools(root))


class Alive:
    """A follower at work."""

    def poll(self) -> None:
        return None


def test_a_short_stage_tells_of_a_server_that_did_not_answer_earlier_ones(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = SpoolTracker.__new__(SpoolTracker)
    tracker.root, tracker.spool, tracker.follower = root, spooled(root), Alive()
    tracker._warn_if_unsent()
    assert capsys.readouterr().err == ""
    spooled(root, "sft", None).save_error("ConnectionError: refused")
    tracker._warn_if_unsent()
    assert re.search(r"not sent \(ConnectionError: refused\).*python -m stages.tracking", capsys.readouterr().err)
    tracker.spool.save_sent(Sent("run", 10))
    tracker._warn_if_unsent()
    assert capsys.readouterr().err == "", "the server answers again, and the follower sends what is left"
