"""A judge behind a server: budgets, what is asked again, and when a run stops."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from judge_server import completion, judge, no_server, question, verdict
from pydantic import ValidationError

from stages.judging.contract import Cost, JudgeError, Status
from stages.judging.settings import ServerParams


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
