"""A judge behind a server: structured replies, failures that lose nothing and are counted, budgets, and runs from the cache."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.judging.contract import Candidate, Cost, JudgeError, Question, Rubric, Status
from stages.judging.orders import Match, play
from stages.judging.replies import messages, parse, schema
from stages.judging.server import ServerJudge
from stages.judging.settings import ServerParams
from stages.judging.table import judgment_row, write_judgments
from stages.records.episode import read_rows

RUBRIC = Rubric(answer=("clarity", "depth"))
Handler = Callable[[httpx.Request], httpx.Response]


def question(number: int = 0, kind: str = "pairwise") -> Question:
    shown = tuple(
        Candidate(f"text {number}{side}", name=f"{number}{side}") for side in ("a", "b")[: 2 if kind == "pairwise" else 1]
    )
    rubric = Rubric(items=("short", "polite")) if kind == "checklist" else RUBRIC
    return Question(kind, "task", "write a text", shown, rubric)  # type: ignore[arg-type]


def completion(content: str, **message: Any) -> httpx.Response:
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return httpx.Response(200, json={"choices": [choice], "usage": usage})


def verdict(request: httpx.Request) -> httpx.Response:
    """Longer clarity for the first, always the same reason."""
    return completion(VERDICT)


VERDICT = '{"reason": "because", "first": {"clarity": 8, "depth": 7}, "second": {"clarity": 4, "depth": 4}}'


def judge(root: Path, handler: Handler, waits: list[float] | None = None, **params: Any) -> ServerJudge:
    settings = ServerParams(model="m", requests=params.pop("requests", 1), **params)
    sleep = [].append if waits is None else waits.append
    return ServerJudge(settings, root, httpx.MockTransport(handler), sleep)


def no_server(request: httpx.Request) -> httpx.Response:
    raise AssertionError("the server was asked")


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


def test_silent_server_stops_the_run_and_is_asked_again(tmp_path: Path) -> None:
    """Contract: an outage loses nothing: what was judged is kept, what was not is asked when the run resumes."""

    def half(request: httpx.Request) -> httpx.Response:
        if "text 0" in json.loads(request.content)["messages"][1]["content"]:
            return verdict(request)
        raise httpx.ConnectError("gone")

    questions = [question(number) for number in range(6)]
    with pytest.raises(JudgeError, match="base_url"):
        judge(tmp_path, half, attempts=1, give_up_after=3).judge(questions)
    again = judge(tmp_path, verdict)
    assert all(judgment.ok for judgment in again.judge(questions))
    assert again.sent == 5, "the first was kept"


@pytest.mark.parametrize("failure", [401, 503])
def test_what_was_answered_beside_a_failure_is_kept(tmp_path: Path, failure: int) -> None:
    """Contract: a rejected key, or giving up, loses no reply that came at the same time."""
    together = threading.Barrier(3, timeout=30)

    def first_fails(request: httpx.Request) -> httpx.Response:
        together.wait()
        failed = "text 0" in json.loads(request.content)["messages"][1]["content"]
        return httpx.Response(failure) if failed else verdict(request)

    server = judge(tmp_path, first_fails, requests=3, attempts=1, give_up_after=1)
    with pytest.raises(JudgeError):
        server.judge([question(number) for number in range(3)])
    server.close()
    assert all(one.ok for one in judge(tmp_path, no_server).judge([question(1), question(2)]))


def test_failures_of_an_earlier_call_are_asked_anew_after_giving_up(tmp_path: Path) -> None:
    """Contract: the outage that ends the run may have begun in an earlier call; what a checkpoint holds stays a failure."""

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    server = judge(tmp_path, gone, attempts=1, give_up_after=5)
    assert not any(one.ok for one in server.judge([question(0), question(1)]))
    server.keep()  # as a checkpoint does
    server.judge([question(2), question(3)])
    with pytest.raises(JudgeError, match="since the last answer or checkpoint is asked anew"):
        server.judge([question(4)])
    server.close()
    again = judge(tmp_path, verdict)
    assert [one.status for one in again.judge([question(n) for n in range(5)])] == [Status.UNAVAILABLE] * 2 + [Status.OK] * 3
    assert again.sent == 3


def test_an_answer_makes_earlier_failures_final(tmp_path: Path) -> None:
    """Contract: a server that answers again was not gone: what it failed on is stored, and a repetition has the same failures."""
    replies = iter([httpx.Response(503), httpx.Response(503)])
    server = judge(tmp_path, lambda request: next(replies, None) or verdict(request), attempts=1)
    server.judge([question(0), question(1)])
    server.judge([question(2)])
    again = judge(tmp_path, no_server).judge([question(n) for n in range(3)])
    assert [one.status for one in again] == [Status.UNAVAILABLE] * 2 + [Status.OK]


def test_stored_failures_do_not_count_as_an_outage(tmp_path: Path) -> None:
    questions = [question(number) for number in range(3)]
    failing = judge(tmp_path, lambda request: httpx.Response(503), attempts=1)
    failing.judge(questions)
    failing.keep()
    again = judge(tmp_path, no_server, give_up_after=2).judge(questions)
    assert [one.status for one in again] == [Status.UNAVAILABLE] * 3


def test_wrong_key_or_model_stops_at_once(tmp_path: Path) -> None:
    for status, remedy in ((401, "OPENAI_API_KEY"), (402, "credit"), (404, "model"), (308, "redirects")):
        with pytest.raises(JudgeError, match=remedy):
            judge(tmp_path, lambda request, status=status: httpx.Response(status)).judge([question()])


def test_budget_in_calls_holds_and_repeats(tmp_path: Path) -> None:
    for handler in (verdict, no_server):
        server = judge(tmp_path, handler, max_calls=5, requests=2)
        judgments = server.judge([question(number) for number in range(8)])
        assert [one.status for one in judgments] == [Status.OK] * 5 + [Status.BUDGET] * 3
        assert server.judge([question(9)])[0].status is Status.BUDGET
        assert server.spent.calls == 5


def test_retries_stay_within_the_budget(tmp_path: Path) -> None:
    """The first question takes five attempts, the second the two that are left."""
    server = judge(tmp_path, lambda request: completion("nonsense"), max_calls=7, requests=2, attempts=5)
    found = server.judge([question(number) for number in range(4)])
    assert [(one.status, one.cost.calls) for one in found] == [
        (Status.NONSENSE, 5),
        (Status.NONSENSE, 2),
        (Status.BUDGET, 0),
        (Status.BUDGET, 0),
    ]
    assert server.sent == server.spent.calls == 7


def dearest(root: Path, **prices: Any) -> float:
    """What an attempt at a question costs at most."""
    server = judge(root, verdict, **prices)
    body = json.dumps(server.request(question()))
    return (len(body) * server.params.price_in + server.params.max_tokens * server.params.price_out) / 1e6


def test_budget_in_money_is_never_exceeded(tmp_path: Path) -> None:
    """Replies cost 140e-6, and a request may cost `most`: three fit into most + 2 * 140e-6, two into a little less."""
    prices = {"price_in": 1.0, "price_out": 2.0}
    most = dearest(tmp_path, **prices)
    assert most > 140e-6
    for budget, answered in ((most + 2.01 * 140e-6, 3), (most + 1.99 * 140e-6, 2), (most * 0.99, 0)):
        server = judge(tmp_path, verdict, max_money=budget, cache="", attempts=1, **prices)
        found = server.judge([question(number) for number in range(5)])
        assert [one.status for one in found] == [Status.OK] * answered + [Status.BUDGET] * (5 - answered)
        assert server.spent.money == pytest.approx(answered * 140e-6)
        assert server.spent.money <= budget
        assert "a request may cost" in found[-1].reason
    with pytest.raises(ValidationError, match="price_in"):
        ServerParams(model="m", max_money=1.0)


@pytest.mark.parametrize("budget", [{"max_calls": 11}, {"max_money": 0.01, "price_in": 1.0, "price_out": 1.0}])
def test_budgets_do_not_depend_on_requests_in_flight(tmp_path: Path, budget: dict[str, Any]) -> None:
    """Contract: how many requests are in flight changes neither what is asked nor what it costs, also where some take retries."""

    def uneven(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        number = int(body["messages"][1]["content"].partition("text ")[2].partition("a")[0])
        if number % 3 == 1 and body["seed"] < 1000 * (number % 5):
            return completion("nonsense")
        time.sleep(0.002 * (number % 4))
        return verdict(request)

    outcomes = []
    for requests in (1, 2, 4, 8):
        server = judge(tmp_path, uneven, requests=requests, attempts=3, cache="", **budget)
        found = server.judge([question(number) for number in range(80)])
        outcomes.append(([(one.status, one.cost) for one in found], server.spent))
        assert server.sent == server.spent.calls
    statuses = [status for status, _ in outcomes[0][0]]
    assert statuses.count(Status.OK) > 2
    assert Status.BUDGET in statuses
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert server.spent.money <= budget["max_money"] if "max_money" in budget else server.spent.calls == 11


def test_requests_are_in_flight_together_within_a_budget(tmp_path: Path) -> None:
    """A budget that is not at its end costs no time: the four requests wait for one another."""
    together = threading.Barrier(4, timeout=30)

    def waits(request: httpx.Request) -> httpx.Response:
        together.wait()
        return verdict(request)

    server = judge(tmp_path, waits, requests=4, attempts=2, max_calls=100)
    assert all(one.ok for one in server.judge([question(number) for number in range(8)]))


def test_equal_questions_are_asked_and_paid_once(tmp_path: Path) -> None:
    """Contract: the table's costs add up to what was spent."""
    server = judge(tmp_path, verdict, price_in=1.0)
    found = server.judge([question(), question(1), question(), question()])
    assert [one.cost.calls for one in found] == [1, 1, 0, 0]
    assert len({one.scores for one in found}) == 1
    assert sum((one.cost for one in found), Cost()) == server.spent
    assert (server.sent, server.spent.tokens_in) == (2, 200)


def test_a_long_pause_is_waited_for_or_counted(tmp_path: Path) -> None:
    """Contract: no Retry-After is cut short: up to longest_wait_s it is honoured, beyond it the judgment fails and says why."""
    for longest, waits in ((300.0, [120.0]), (60.0, [])):
        replies, slept = iter([httpx.Response(429, headers={"retry-after": "120"})]), list[float]()

        def once_limited(request: httpx.Request, replies=replies) -> httpx.Response:
            return next(replies, None) or verdict(request)

        (found,) = judge(tmp_path, once_limited, slept, longest_wait_s=longest, cache="").judge([question()])
        assert slept == waits
        assert found.ok is bool(waits)
    assert found.status is Status.RATE_LIMIT
    assert found.reason == "HTTP 429: it asks for a pause of 120 s, and longest_wait_s is 60"
    assert found.cost.calls == 1


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
