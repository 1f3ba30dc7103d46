"""Requests that the agent's server rejects: foreign hosts and origins, large bodies, invalid numbers and text. Nothing is
computed for them or for clients that have disconnected."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from served import until
from test_engine_thread import Slow

from stages.agent.best_of_n import BestOfEngine, by_logprob
from stages.agent.chat import Chat
from stages.agent.policy import load_policy
from stages.engine.engine import Sampling
from stages.serving.app import Agent, make_app
from stages.serving.engine_thread import EngineThread
from stages.serving.request_guard import MAX_BODY, MAX_MESSAGE
from stages.serving.variants import PLAIN

MAX_LENGTH = 64
REQUEST = {"model": "merged", "prompt": [5, 6], "max_tokens": 4}


@pytest.fixture(scope="module")
def server(tiny_policy: Path) -> Iterator[SimpleNamespace]:
    engine = Slow()
    chat = Chat(load_policy(tiny_policy).tokenizer)
    turns = EngineThread(BestOfEngine(engine, 1, by_logprob, str))  # type: ignore[arg-type]
    agent = Agent(turns, chat, {"merged": PLAIN}, "0", Sampling(max_tokens=4), MAX_LENGTH)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    serving = uvicorn.Server(uvicorn.Config(make_app(agent), log_level="critical", lifespan="off", ws="none"))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0) as client:
        yield SimpleNamespace(port=port, client=client, engine=engine)
    serving.should_exit = True
    thread.join()
    turns.close()
    assert engine.open_sessions == {}


def still_answers(server: SimpleNamespace) -> bool:
    reply = server.client.post("/v1/completions", json={**REQUEST, "seed": 3})
    return bool(reply.status_code == 200 and reply.json()["choices"])


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error of a reply in the form of OpenAI's API."""
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


@pytest.mark.parametrize("host", ["attacker.example", "127.0.0.1.attacker.example", "localhost@attacker.example", ""])
def test_foreign_host_headers_are_rejected(host: str, server: SimpleNamespace) -> None:
    """Contract: a page whose host name resolves to 127.0.0.1 after it was loaded (DNS rebinding) gets nothing."""
    for method, path, body in (("POST", "/v1/completions", REQUEST), ("GET", "/v1/models", None), ("GET", "/health", None)):
        reply = server.client.request(method, path, json=body, headers={"Host": f"{host}:{server.port}" if host else ""})
        assert reply.status_code == 421
        assert error_of(reply)["code"] == "wrong_host"
    for own in (f"localhost:{server.port}", "LOCALHOST:8010", "127.0.0.1"):
        assert server.client.get("/v1/models", headers={"Host": own}).status_code == 200


@pytest.mark.parametrize("origin", ["https://attacker.example", "null", "http://localhost.attacker.example:8000"])
def test_foreign_origins_are_rejected(origin: str, server: SimpleNamespace) -> None:
    """Contract: a request of another site's page is not computed, whether or not the browser would show it the answer."""
    steps = len(server.engine.steps)
    kinds = ("application/json", "text/plain")  # the second needs no preflight
    for kind in kinds:
        headers = {"Origin": origin, "Content-Type": kind}
        reply = server.client.post("/v1/completions", content=json.dumps(REQUEST), headers=headers)
        assert (reply.status_code, error_of(reply)["code"]) == (403, "wrong_origin")
        assert "access-control-allow-origin" not in reply.headers
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert server.client.options("/v1/completions", headers=preflight).status_code == 403
    assert len(server.engine.steps) == steps
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.client.post("/v1/completions", json={**REQUEST, "seed": 3}, headers=own).status_code == 200


def test_body_size_is_limited_with_and_without_content_length(server: SimpleNamespace) -> None:
    long = json.dumps({**REQUEST, "prompt": "a" * MAX_BODY}).encode()

    def chunks() -> Iterator[bytes]:  # without Content-Length
        for start in range(0, len(long), 65536):
            yield long[start : start + 65536]

    for content in (long, chunks()):
        reply = server.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert (reply.status_code, error_of(reply)["code"]) == (413, "request_too_large")
    assert still_answers(server)


LONE_SURROGATE = '"\\ud800"'
"""JSON of an unpaired surrogate."""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"model": "merged", "prompt": [5], "top_k": 9223372036854775808}', "top_k: Input should be less than or equal to"),
        ('{"model": "merged", "prompt": [5], "temperature": 1e-320}', "temperature: Input should be 0 or at least 0.001"),
        ('{"model": "merged", "prompt": [5], "temperature": NaN}', "temperature: Input should be"),
        ('{"model": "merged", "prompt": [5], "temperature": 1e999}', "temperature: Input should be"),
        ('{"model": "merged", "prompt": [5], "top_p": NaN}', "top_p: Input should be"),
        ('{"model": "merged", "prompt": [5], "max_tokens": 9223372036854775808}', "max_tokens: Input should be less than"),
        ('{"model": "merged", "prompt": [5], "n": 65}', "n: Input should be less than or equal to 64"),
        ('{"model": "merged", "prompt": [5], "seed": 18446744073709551616}', "seed: Input should be less than"),
        ('{"model": "merged", "prompt": [5], "seed": 1' + "0" * 5000 + "}", "."),
        ('{"model": "merged", "prompt": [9223372036854775808]}', "prompt must be non-empty text or token ids from 0 to"),
        ('{"model": "merged", "prompt": [5, -1]}', "prompt must be non-empty text or token ids from 0 to"),
        (f'{{"model": "merged", "prompt": {json.dumps(["a"] * 65)}}}', "prompt.*at most 64 items"),
        (f'{{"model": "merged", "prompt": {json.dumps([[5]] * 64)}, "n": 64}}', "64 prompts with n = 64 exceed"),
        (f'{{"model": "merged", "prompt": {json.dumps([1.5] * 5000)}}}', "and 4995 more errors"),
        ('{"model": "merged", "prompt": {"a": 1}}', "prompt"),
        (f'{{"model": "merged", "prompt": {LONE_SURROGATE}}}', r"unpaired surrogate \\ud800"),
        (f'{{"model": {LONE_SURROGATE}, "prompt": [5]}}', "unpaired surrogate"),
        (f'{{"model": "merged", "prompt": [5], {LONE_SURROGATE}: 1}}', "unpaired surrogate"),
        (f'{{"model": "merged", "prompt": [5], "stop": [{LONE_SURROGATE}]}}', "unpaired surrogate"),
        (f'{{"model": "merged", "messages": [{{"role": "user", "content": {LONE_SURROGATE}}}]}}', "unpaired surrogate"),
        ('{"model": "' + "m" * 5000 + '", "prompt": [5]}', "model: String should have at most 1024 characters"),
        ('{"model": "merged", "prompt": [5], "stop": "' + "s" * 5000 + '"}', "stop is not supported"),
        ("[" * 100_000, "."),
        ("\xff\xfe", "."),
        ("", "."),
        ("[]", "a request must be a JSON object|valid dictionary"),
    ],
)
def test_invalid_requests_do_not_reach_the_engine(body: str, words: str, server: SimpleNamespace) -> None:
    """Contract: an invalid request gets status 400 and an error in OpenAI's format; nothing of it reaches the engine, and others
    are answered."""
    made = server.engine.made
    path = "/v1/chat/completions" if '"messages"' in body else "/v1/completions"
    headers = {"Content-Type": "application/json"}
    reply = server.client.post(path, content=body.encode("latin-1"), headers=headers)
    assert reply.status_code == 400, reply.text
    message = error_of(reply)["message"]
    assert re.search(words, message), message
    assert len(message) < MAX_MESSAGE + 10
    assert server.engine.made == made
    assert still_answers(server)


def test_unknown_paths_and_methods_give_errors_in_the_same_format(server: SimpleNamespace) -> None:
    assert server.client.get("/v1/nothing").status_code == 404
    assert error_of(server.client.get("/v1/nothing"))["message"]
    assert server.client.get("/v1/completions").status_code == 405
    assert error_of(server.client.get("/v1/completions"))["message"]


def test_nothing_is_computed_for_a_disconnected_client(server: SimpleNamespace) -> None:
    """Contract: when the connection closes, its jobs are cancelled; other requests are unaffected."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = json.dumps({**REQUEST, "seed": Slow.SLOW, "n": 3})
    steps = len(server.engine.steps)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: len(server.engine.steps) > steps + 20, "decoding", 60)
        assert server.engine.open_sessions
    until(lambda: not server.engine.open_sessions, "cancelled", 60)
    steps = len(server.engine.steps)
    assert still_answers(server)
    assert all(Slow.SLOW not in step for step in server.engine.steps[steps:])
