"""Members of a pool of priced tools: their settings, a model in a folder, and a server whose replies are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from stages.environments.pool import Member, Pool, Reply
from stages.environments.pool.reply import cost
from stages.environments.pool.server import ServerBackend
from stages.environments.pool.settings import LocalModel, Server

SERVER = {"base_url": "http://127.0.0.1:9/v1", "model": "big"}


def backend(folder: Path, handler: Callable[[httpx.Request], httpx.Response], **changes: Any) -> ServerBackend:
    settings = Server(**{**SERVER, "cache": str(folder), **changes})
    return ServerBackend("big", settings, 32, httpx.MockTransport(handler), lambda _: None)


def completion(text: str, tokens: int | None = 7) -> httpx.Response:
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    return httpx.Response(200, json={"choices": [{"message": {"content": text}}], **usage})


def gone(request: httpx.Request) -> httpx.Response:
    raise AssertionError("the server was asked")


def test_a_call_costs_price_times_tokens() -> None:
    """The paper's units: 50 tokens at 0.3 and 100 at 0.88 are 15 and 88 millionths."""
    calls = [(50, 0.3), (100, 0.88)]
    assert sum(cost(Reply("x", tokens), Member(name="a", price=price)) for tokens, price in calls) == pytest.approx(103.0)


def test_server_is_asked_once_and_its_reply_is_stored(tmp_path: Path) -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return completion("Dorvin\nfounded it.")

    first = backend(tmp_path, answer, prompt="Briefly: {question}")
    assert first.ask("Kelmar founder") == Reply("Dorvin founded it.", 7)
    assert b"Briefly: Kelmar founder" in sent[0].content
    assert backend(tmp_path, gone, prompt="Briefly: {question}").ask("Kelmar founder") == Reply("Dorvin founded it.", 7)
    assert len(sent) == 1


def test_servers_of_one_model_name_have_replies_of_their_own(tmp_path: Path) -> None:
    """Contract: members that differ in their server alone share no stored replies."""
    urls = {"http://one/v1": "Dorvin", "http://two/v1": "Kelmar"}
    for url, text in urls.items():
        assert backend(tmp_path, lambda _, text=text: completion(text), base_url=url).ask("who?").text == text
    for url, text in urls.items():
        assert backend(tmp_path, gone, base_url=f"{url}/").ask("who?").text == text


def test_server_that_fails_is_asked_again_and_then_named(tmp_path: Path) -> None:
    replies = [httpx.Response(503), httpx.Response(200, json={}), completion("Dorvin", None)]
    assert backend(tmp_path, lambda _: replies.pop(0)).ask("one") == Reply("Dorvin", 1)
    named = r"pool member big: the server at http://127.0.0.1:9/v1 .*HTTP 500.*run the stage again"
    with pytest.raises(RuntimeError, match=named):
        backend(tmp_path, lambda _: httpx.Response(500)).ask("two")
    with pytest.raises(RuntimeError, match="HTTP 404"):
        backend(tmp_path, lambda _: httpx.Response(404), attempts=100).ask("two")
    assert backend(tmp_path, lambda _: httpx.Response(400)).ask("three") == Reply("None", 0), "a question that it rejects"


def test_model_in_a_folder_answers_greedily(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "data/raw/model"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tiny_policy)
    monkeypatch.chdir(tmp_path)
    member = Member(name="tiny", about="a tiny model", price=1.0, model=LocalModel(folder="data/raw/model"))
    first, again = (Pool([member], 4).ask(member, "take the key") for _ in range(2))
    assert first == again
    assert 0 < first.tokens <= 4
    (tmp_path / "data/raw/empty").mkdir()
    lacking = member.model_copy(update={"model": LocalModel(folder="data/raw/empty")})
    with pytest.raises(ValueError, match=r"no config\.json"):
        Pool([lacking], 4).ask(lacking, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Big one"}, "name"),
        ({"price": -1.0}, "price"),
        ({"server": SERVER}, "about is empty"),
        ({"about": "x", "server": SERVER, "model": {"folder": "data/base"}}, "several of retriever, model and server"),
        ({"about": "x", "model": {"folder": "data/models/merged"}}, "copy the model below data/raw"),
        ({"about": "x", "server": {**SERVER, "base_url": "localhost:80"}}, "begin with http"),
        ({"about": "x", "server": {**SERVER, "prompt": "answer"}}, r"must contain \{question\}"),
    ],
)
def test_bad_members_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Member.model_validate({"name": "big", "price": 1.0, **changes})


def test_processes_that_ask_the_same_get_the_same_reply(tmp_path: Path) -> None:
    """Contract: a run repeats from the stored replies, so nobody has seen another one, and nobody removes what another writes."""
    replies: list[Reply] = []
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 1:
            other.start()
            other.join(0.5)
            return completion("Dorvin")
        return completion("Kelmar")

    other = Thread(target=lambda: replies.append(backend(tmp_path, answer).ask("who?")))
    replies.append(backend(tmp_path, answer).ask("who?"))
    other.join()
    assert replies == [backend(tmp_path, gone).ask("who?")] * 2
