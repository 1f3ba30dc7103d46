"""A chat model behind a server: pauses that it asks for."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from stages.judging.chat_server import ChatServer
from stages.judging.chat_settings import ChatParams
from stages.judging.contract import JudgeError


def server(root: Path, replies: list[httpx.Response], waits: list[float]) -> ChatServer:
    left, params = iter(replies), ChatParams(model="m", cache="", requests=1)
    return ChatServer(params, "rl.guidance.server", root, httpx.MockTransport(lambda _: next(left)), waits.append)


def limited(seconds: int) -> httpx.Response:
    return httpx.Response(429, headers={"retry-after": str(seconds)})


def said(text: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


def test_a_pause_that_the_server_asks_for_is_not_cut_short(tmp_path: Path) -> None:
    """Contract: up to 300 s it is waited for; beyond that the run ends and says why."""
    waits: list[float] = []
    found = server(tmp_path, [limited(120), httpx.Response(503), said("hint")], waits).write([[{"role": "user", "content": "a"}]])
    assert (found, waits) == (["hint"], [120.0, 2.0])
    with pytest.raises(JudgeError, match="no reply in 1 attempts, the last with HTTP 429 that asks for a pause of 301 s"):
        server(tmp_path, [limited(301)], waits).write([[{"role": "user", "content": "a"}]])
