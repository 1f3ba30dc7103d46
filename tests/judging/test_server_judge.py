"""A judge behind a server: structured replies, failures that lose nothing and are counted, and runs from the cache."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from judge_server import RUBRIC, VERDICT, Handler, completion, judge, no_server, question, verdict

from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.judging.contract import Candidate, Status
from stages.judging.orders import Match, play
from stages.judging.replies import messages, parse, schema
from stages.judging.server import ServerJudge
from stages.judging.settings import ServerParams
from stages.judging.table import judgment_row, write_judgments
from stages.records.episode import read_rows


def test_scores_are_recomputed_and_the_reason_comes_first(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return verdict(request)

    (judgment,) = judge(tmp_path, handler).judge([question()])
    assert judgment.scores == (8.0, 4.0), "round(7.5) and round(4)"
    assert judgment.reason == "because"
    (body,) = sent
    properties = body["response_format"]["json_schema"]["schema"]["properties"]
    assert list(properties) == ["reason", "first", "second"]
    assert "text 0a" in body["messages"][1]["content"]
    assert "0a\n" not in body["messages"][1]["content"].replace("text 0a\n", ""), "names are not shown"


def test_a_server_that_moved_keeps_its_replies(tmp_path: Path) -> None:
    """Contract: a stage that stopped without its server finds what was judged after `base_url` is set, as its error says."""
    (first,) = judge(tmp_path, verdict, base_url="http://127.0.0.1:8001/v1").judge([question()])
    (again,) = judge(tmp_path, no_server, base_url="http://127.0.0.1:8002/v1").judge([question()])
    assert first == again


def test_run_repeats_from_its_cache_to_the_same_bytes(tmp_path: Path) -> None:
    """Contract: the second run asks no server, and its table has the same bytes, failures included."""

    def sometimes(request: httpx.Request) -> httpx.Response:
        text = json.loads(request.content)["messages"][1]["content"]
        if "text 1a" in text:
            return httpx.Response(429)
        return completion("no idea") if "text 2a" in text else verdict(request)

    tables = []
    for run, handler in enumerate((sometimes, no_server)):
        server = judge(tmp_path, handler, attempts=3, price_in=1.0, price_out=2.0)
        questions = [question(number) for number in range(4)]
        rows = [judgment_row(server, one, made) for one, made in zip(questions, server.judge(questions), strict=True)]
        server.keep()
        write_judgments(tmp_path / f"{run}.parquet", rows)
        tables.append((tmp_path / f"{run}.parquet").read_bytes())
        assert server.spent.calls == 2 + 3 + 3
        assert server.spent.money == pytest.approx((2 + 3) * (100 * 1.0 + 20 * 2.0) / 1e6)
        assert server.sent == (8 if run == 0 else 0)
    assert tables[0] == tables[1]
    statuses = {row["candidates"][0]: row["status"] for row in read_rows(tmp_path / "0.parquet")}
    assert statuses == {"0a": "ok", "1a": "rate_limit", "2a": "nonsense", "3a": "ok"}


@pytest.mark.parametrize(
    ("handler", "status"),
    [
        (lambda request: completion("I think both are fine."), Status.NONSENSE),
        (lambda request: completion('{"reason": "", "first": {"clarity": 99, "depth": 1}, "second": {}}'), Status.NONSENSE),
        (lambda request: httpx.Response(200, text="<html>"), Status.NONSENSE),
        (lambda request: httpx.Response(200, json={"choices": []}), Status.NONSENSE),
        (lambda request: completion("", refusal="I can't judge that."), Status.REFUSAL),
        (lambda request: httpx.Response(429, headers={"retry-after": "7"}), Status.RATE_LIMIT),
        (lambda request: httpx.Response(503), Status.UNAVAILABLE),
        (lambda request: httpx.Response(400, json={"error": "too long"}), Status.REJECTED),
        (lambda request: httpx.Response(400, json={"error": {"code": "content_filter"}}), Status.REFUSAL),
        (lambda request: httpx.Response(403, json={"error": {"metadata": {"flagged_input": "x"}}}), Status.REFUSAL),
        (lambda request: httpx.Response(408), Status.TIMEOUT),
        (lambda request: httpx.Response(200, json={"error": {"code": 429, "message": "slow down"}}), Status.RATE_LIMIT),
        (lambda request: httpx.Response(200, json={"error": {"message": "overloaded"}}), Status.UNAVAILABLE),
        (lambda request: httpx.Response(200, text="[" * 100_000), Status.NONSENSE),
        (lambda request: httpx.Response(200, content=b"\xff\xfe"), Status.NONSENSE),
        (lambda request: completion({"a": 1}), Status.NONSENSE),  # type: ignore[arg-type]
        (lambda request: completion(VERDICT.replace("8", "1" * 400)), Status.NONSENSE),
        (lambda request: completion(VERDICT.replace("8", "NaN")), Status.NONSENSE),
        (lambda request: completion("{" * 30_000), Status.NONSENSE),
    ],
)
def test_failures_have_a_status_and_become_ties(tmp_path: Path, handler: Handler, status: Status) -> None:
    waits: list[float] = []
    server = judge(tmp_path, handler, waits, attempts=3)
    (judgment,) = server.judge([question()])
    assert (judgment.status, judgment.scores) == (status, ())
    assert judgment.cost.calls == (1 if status in (Status.REFUSAL, Status.REJECTED) else 3)
    if status in (Status.RATE_LIMIT, Status.UNAVAILABLE, Status.TIMEOUT):
        assert waits in ([7.0, 7.0], [1.0, 2.0]), "Retry-After, or doubled pauses"
    else:
        assert waits == []
    write_judgments(tmp_path / "table.parquet", [judgment_row(server, question(), judgment)])
    assert read_rows(tmp_path / "table.parquet")[0]["status"] == status
    match = Match("task", "p", Candidate("a", name="a"), Candidate("b", name="b"), RUBRIC)
    assert play(server, [match])[0] == [(10.0, 10.0)]


@pytest.mark.parametrize(
    ("content", "usage"),
    [
        (VERDICT.replace("because", "\\ud800"), {"prompt_tokens": 10**30, "completion_tokens": -5}),
        ([{"type": "text", "text": VERDICT}], {"prompt_tokens": "many"}),
        (VERDICT, {"prompt_tokens": 1e400}),
    ],
)
def test_odd_replies_with_a_verdict_count(tmp_path: Path, content: Any, usage: dict[str, Any]) -> None:
    """Text that no file can hold, content in parts, and numbers of tokens that are none: the verdict is used and stored."""
    body = json.dumps({"choices": [{"message": {"content": content}}], "usage": usage})
    for handler in (lambda request: httpx.Response(200, text=body), no_server):
        server = judge(tmp_path, handler)
        (judgment,) = server.judge([question()])
        assert judgment.scores == (8.0, 4.0)
        assert judgment.reason in ("because", "?")
        assert (judgment.cost.tokens_in, judgment.cost.tokens_out) == (0, 0)
        write_judgments(tmp_path / "table.parquet", [judgment_row(server, question(), judgment)])


def test_equal_requests_of_two_tasks_have_one_reply(tmp_path: Path) -> None:
    """Contract: a run repeats from its cache to the same bytes, though the server answers the same request differently."""
    scores = iter(range(10))
    answers = [json.dumps({"first": {"clarity": n, "depth": n}, "second": {"clarity": 1, "depth": 1}}) for n in range(10)]
    same = [replace(question(), task_id=task) for task in ("a", "b")]
    first = judge(tmp_path, lambda request: completion(answers[next(scores)]), requests=2).judge(same)
    assert judge(tmp_path, no_server).judge(same) == first
    assert first[0].scores == first[1].scores


def test_timeouts_are_tried_again(tmp_path: Path) -> None:
    replies = iter([httpx.ReadTimeout("slow"), httpx.ConnectError("gone"), None])

    def handler(request: httpx.Request) -> httpx.Response:
        failure = next(replies)
        if failure is not None:
            raise failure
        return verdict(request)

    (judgment,) = judge(tmp_path, handler).judge([question()])
    assert judgment.ok
    assert judgment.cost.calls == 3


@pytest.mark.parametrize("structured", [True, False])
def test_process_and_answer_may_share_a_criterion(tmp_path: Path, structured: bool) -> None:
    """Contract: arena_rl's default rubric has relevance of steps and of the answer: both are asked for, and both count."""
    rubric = resolve(Rl.model_validate({"algorithm": "arena_rl"})).rl.judge.scoring().rubric
    assert set(rubric.process) & set(rubric.answer) == {"relevance"}
    asked = replace(question(), rubric=rubric)
    scores = {"process": dict.fromkeys(rubric.process, 10), "answer": dict.fromkeys(rubric.answer, 5)}
    second = {**scores, "process": dict.fromkeys(rubric.process, 0)}
    sent: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return completion(json.dumps({"reason": "r", "first": scores, "second": second}))

    (found,) = judge(tmp_path, handler, structured=structured).judge([asked])
    assert found.scores == (8.0, 2.0), "0.6 * 10 + 0.4 * 5, and 0.4 * 5"
    assert 'as "process" its steps on breadth, relevance, detail' in sent[0]["messages"][1]["content"]
    if structured:
        first = sent[0]["response_format"]["json_schema"]["schema"]["properties"]["first"]["properties"]
        assert [list(first[part]["properties"]) for part in ("process", "answer")] == [list(rubric.process), list(rubric.answer)]
    for wrong in ({"process": scores["process"]}, {**scores["answer"], "breadth": 1, "detail": 1}, [1]):
        with pytest.raises(ValueError, match="lacks"):
            parse(asked, json.dumps({"first": wrong, "second": wrong}))


def test_failures_are_asked_again_on_request(tmp_path: Path) -> None:
    judge(tmp_path, lambda request: completion("what?"), attempts=1).judge([question()])
    assert judge(tmp_path, no_server).judge([question()])[0].status is Status.NONSENSE
    assert judge(tmp_path, verdict, ask_failed_again=True).judge([question()])[0].ok


def test_any_change_of_the_request_misses_the_cache(tmp_path: Path) -> None:
    judge(tmp_path, verdict).judge([question()])
    for change in ({"temperature": 0.5}, {"max_tokens": 100}, {"structured": False}):
        other = judge(tmp_path, verdict, **change)
        other.judge([question()])
        assert other.sent == 1, change


def test_damaged_reply_names_its_file(tmp_path: Path) -> None:
    server = judge(tmp_path, verdict)
    server.judge([question()])
    (path,) = (tmp_path / "data/judgments").rglob("*.json")
    path.write_text("{")
    with pytest.raises(ValueError, match=path.name):
        server.judge([question()])


def test_checklists_and_pointwise_scores(tmp_path: Path) -> None:
    replies = {
        "checklist": {"reason": "r", "items": [True, False]},
        "pointwise": {"reason": "r", "first": {"clarity": 5, "depth": 6}},
    }
    for kind, reply in replies.items():
        (judgment,) = judge(tmp_path, lambda request, reply=reply: completion(json.dumps(reply))).judge([question(kind=kind)])
        assert judgment.scores == ((1.0, 0.0) if kind == "checklist" else (6.0,)), "round(5.5) is 6"
        assert messages(question(kind=kind))[1]["content"].count("# ") >= 3
        assert next(iter(schema(question(kind=kind))["properties"])) == "reason"


@pytest.mark.parametrize(
    "text",
    ["```json\n{}\n```", '<think>{"a": 1}</think> {}', "{}"],
)
def test_text_around_the_verdict_is_ignored(text: str) -> None:
    good = '{"first": {"clarity": 1, "depth": 1}, "second": {"clarity": 2, "depth": 2}}'
    assert parse(question(), text.replace("{}", good))[0] == (1.0, 2.0)


def test_real_http(tmp_path: Path) -> None:
    """Over a socket, as with any OpenAI-compatible server; the key is sent."""
    seen: list[tuple[str, str | None]] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.path, self.headers.get("authorization")))
            self.rfile.read(int(self.headers["content-length"]))
            body = verdict(httpx.Request("POST", "http://x")).content
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = ServerJudge(ServerParams(model="m", base_url=f"http://127.0.0.1:{server.server_port}/v1"), tmp_path)
        assert all(one.ok for one in client.judge([question(number) for number in range(6)]))
        client.close()
        server.shutdown()
    assert {path for path, _ in seen} == {"/v1/chat/completions"}
    assert len(seen) == 6


def test_a_reply_that_drips_is_a_timeout(tmp_path: Path) -> None:
    """Contract: `timeout_s` bounds an attempt, also when bytes keep coming."""

    class Dripping(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            while True:
                time.sleep(0.01)
                yield b" "

    server = judge(tmp_path, lambda request: httpx.Response(200, stream=Dripping()), timeout_s=0.05, attempts=2)
    assert server.judge([question()])[0].status is Status.TIMEOUT

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            while True:
                yield b" " * (1 << 20)

    server = judge(tmp_path, lambda request: httpx.Response(200, stream=Endless()), attempts=1)
    assert server.judge([question(1)])[0].status is Status.UNAVAILABLE
