"""S1: what a row holds, how long it is kept, and that a trace's name is masked as texts are."""

from __future__ import annotations

import json
import resource
from datetime import date
from pathlib import Path

import pytest
from narrow_calls import call_of, logged, small_settings, write_log

from stages.conversion.__main__ import main
from stages.conversion.call_log import CallLog, expire, read_calls, unmasked_lines
from stages.conversion.masking import LeakError, Masker
from stages.conversion.rounds import convert
from stages.conversion.settings import Collect, Conversion

KEY = bytes(range(32))
KINDS = ("email", "phone", "card", "ip", "name")


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_trace_names_are_masked_wherever_they_go(tmp_path: Path, tiny_policy: Path):
    """Contract: a client may name a run after a person; outcomes still find its calls, and the key restores the name."""
    path = tmp_path / "calls.jsonl"
    log = CallLog(path, Masker(KEY, KINDS))
    log.call("run of a.b@c.de", say("hello"), "wish 1", 1.0)
    log.call("run of a.b@c.de", say("write to a.b@c.de"), "wish 2", 1.0)
    log.call("run of x@y.org", say("hello"), "wish 3", 1.0)
    log.outcome("run of a.b@c.de", True)
    CallLog(path, Masker(KEY, KINDS)).call("run of a.b@c.de", say("again"), "wish 4", 1.0)
    assert "a.b@c.de" not in path.read_text()
    calls = read_calls(path)
    assert len({call["trace"] for call in calls}) == 2
    (own,) = {call["trace"] for call in calls if call["outcome"] == 1}
    assert [call["call"] for call in calls if call["trace"] == own] == [0, 1, 2]
    assert next(call for call in calls if call["response"] == "wish 2")["prompt"] == say(
        f"write to {own.removeprefix('run of ')}"
    )
    (tmp_path / "key").write_text(KEY.hex())
    assert {json.loads(line)["trace"] for line in unmasked_lines(path, tmp_path / "key")} == {"run of a.b@c.de", "run of x@y.org"}
    write_log(path, [call_of("intent", 1, trace="c.d@e.fr")])  # a log that was not masked
    convert(Conversion.model_validate(small_settings(tiny_policy)), tmp_path)
    assert not any(b"c.d@e.fr" in file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file())


def test_a_trace_with_personal_data_is_a_leak():
    masker = Masker(KEY, KINDS)
    call = call_of("intent", 1, trace="a.b@c.de")
    with pytest.raises(LeakError, match=r"call 1 \(in its trace's name\) has unmasked personal data: email") as caught:
        masker.check([call])
    assert "a.b@c.de" not in str(caught.value)
    masked = masker.mask_call(call)
    masker.check([masked])
    assert masker.mask_call(masked) == masked


def test_rows_older_than_the_retention_are_deleted_with_their_values(tmp_path: Path):
    """Contract: with 30 days, a row of 1 May is kept until 31 May; its personal data goes with it, not what another row needs."""
    path, vault = tmp_path / "calls.jsonl", tmp_path / "calls.vault.json"
    day = [date(2026, 5, 1)]
    log = CallLog(path, Masker(KEY, KINDS), Collect(retention_days=30), lambda: day[0])
    log.call("old", say("to a.b@c.de"), "ok", 1.0)
    log.outcome("old", True)
    day[0] = date(2026, 5, 31)
    log.call("new", say("to x@y.org"), "ok", 1.0)
    assert [(call["trace"], call["day"]) for call in read_calls(path)] == [("new", "2026-05-31"), ("old", "2026-05-01")]
    assert len(json.loads(vault.read_text())) == 2
    day[0] = date(2026, 6, 1)
    log.call("new", say("to y@z.org"), "ok", 1.0)  # a server that runs on deletes, too
    assert [(call["trace"], call["call"]) for call in read_calls(path)] == [("new", 0), ("new", 1)]
    masker = Masker(KEY, KINDS, vault=json.loads(vault.read_text()))
    assert {masker.unmask(name) for name in masker.vault} == {"x@y.org", "y@z.org"}
    before = path.read_bytes()
    assert expire(path, 30, date(2026, 6, 30)) == 0
    assert expire(path, None, date(2036, 6, 30)) == 0
    assert path.read_bytes() == before
    path.write_bytes(before + b'{"version": 1, "trace": "undated"}\n')
    assert [call["trace"] for call in read_calls(path)] == ["new", "new"]
    assert expire(path, 30, date(2026, 7, 1)) == 2
    assert [call["call"] for call in read_calls(path)] == [1]
    CallLog(path, Masker(KEY, KINDS), Collect(retention_days=1), lambda: date(2027, 1, 1))  # as a server that starts
    assert (path.read_bytes(), json.loads(vault.read_text())) == (b"", {})


def test_a_round_deletes_and_leaves_out_old_rows(tmp_path: Path, tiny_policy: Path):
    log = CallLog(tmp_path / "calls.jsonl", None, clock=lambda: date(2026, 5, 1))
    for call in logged(3, ("intent",)):
        log.call(call["trace"], call["prompt"], call["response"], 1.0)
    values = small_settings(tiny_policy, collect={"retention_days": 10})
    assert convert(Conversion.model_validate(values), tmp_path, today=date(2026, 5, 11))["calls"] == 3
    values["seed"] = 1  # a reason for another round
    assert convert(Conversion.model_validate(values), tmp_path, today=date(2026, 5, 12))["calls"] == 0
    assert (tmp_path / "calls.jsonl").read_bytes() == b""


def test_only_kept_fields_are_written(tmp_path: Path):
    log = CallLog(tmp_path / "calls.jsonl", None, Collect(fields=["prompt", "response"]))
    log.call("t", say("hello"), "ok", 12.5)
    with pytest.raises(
        ValueError, match=r"outcomes are not kept here: collect\.fields of the conversion's settings lacks outcome"
    ):
        log.outcome("t", True)
    (call,) = read_calls(tmp_path / "calls.jsonl")
    assert (call["latency_ms"], call["outcome"], call["response"]) == (None, None, "ok")
    assert "12.5" not in (tmp_path / "calls.jsonl").read_text()


def test_fields_that_learning_needs_are_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    (tmp_path / "conversion.yaml").write_text("collect: {fields: [response]}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["conversion.yaml"]) == 2
    assert "fields lacks prompt, without which nothing can be learned from a call" in capsys.readouterr().err


def test_full_disk_leaves_no_part_of_a_row(tmp_path: Path):
    """A part of a row would spoil the next one, and with it the log, which a server then refuses to continue."""
    path = tmp_path / "calls.jsonl"
    log = CallLog(path, None)
    log.call("t", say("hello"), "ok", 1.0)
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(OSError, match=r"No space left|File too large"):
            log.call("t", say("again"), "ok", 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    log.call("t", say("later"), "ok", 1.0)
    assert [call["prompt"] for call in read_calls(path)] == [say("hello"), say("later")]


def test_servers_of_one_log_keep_each_others_values(tmp_path: Path):
    path, kinds = tmp_path / "calls.jsonl", ("email",)
    first, second = CallLog(path, Masker(KEY, kinds)), CallLog(path, Masker(KEY, kinds))
    first.call("a", say("to a.b@c.de"), "ok", 1.0)
    second.call("b", say("to x@y.org"), "ok", 1.0)
    first.call("c", say("to y@z.org"), "ok", 1.0)
    (tmp_path / "key").write_text(KEY.hex())
    texts = [json.loads(line)["prompt"][0]["content"] for line in unmasked_lines(path, tmp_path / "key")]
    assert texts == ["to a.b@c.de", "to x@y.org", "to y@z.org"]
