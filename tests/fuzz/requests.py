"""Requests to the OpenAI-compatible endpoint with mutated values, keys, bytes, paths and headers: refused with status 4xx in
OpenAI's error format, or answered in OpenAI's format; afterwards a valid request has the same response as before."""

from __future__ import annotations

import atexit
import json
import math
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from starlette.testclient import TestClient

from stages.agent.best_of_n import BestOfEngine, by_logprob
from stages.agent.chat import Chat
from stages.agent.policy import load_policy, policy_hash
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.records.actions import action_key
from stages.serving.app import Agent, make_app
from stages.serving.engine_thread import EngineThread
from stages.serving.variants import PLAIN, Variant
from tests.tiny import make_tiny_policy

from . import mutation
from .outcomes import ACCEPTED, LOST, REFUSED, LostError, Outcome, run_case

MAX_LENGTH = 160
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "take the key"}
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"model": "merged", "messages": [USER], "seed": 7}),
    (
        CHAT,
        {
            **{"model": "merged+vote", "messages": [USER, {"role": "assistant", "content": "go"}, USER], "temperature": 0.7},
            **{"top_p": 0.9, "max_tokens": 4, "n": 2, "seed": 1, "logprobs": True, "top_k": 20, "user": "me"},
        },
    ),
    (
        CHAT,
        {
            "model": "merged",
            "messages": [{"role": "system", "content": "be brief"}, USER],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        CHAT,
        {
            "model": "merged",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_completion_tokens": 3,
        },
    ),
    (COMPLETIONS, {"model": "merged", "prompt": "take the key", "max_tokens": 5, "temperature": 0.0, "logprobs": 1, "seed": 3}),
    (
        COMPLETIONS,
        {"model": "merged+logprob", "prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True, "ignore_eos": False},
    ),
    (COMPLETIONS, {"model": "merged", "prompt": [[5, 6], [7]], "n": 2, "stop_token_ids": [3], "skip_special_tokens": False}),
    (COMPLETIONS, {"model": "merged", "prompt": ["a", "b"], "stop": None, "presence_penalty": 0, "tools": [], "stream": True}),
)
FIELDS = tuple(dict.fromkeys(key for _, body in GOOD for key in body))
EDGES = (
    0,
    1,
    -1,
    2,
    64,
    65,
    128,
    160,
    161,
    2**31,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    0.0,
    1.0,
    1e-320,
    1e-12,
    1e-6,
    5.0,
    100.0,
    1e308,
)
PATHS = (
    "/",
    "/v1",
    "/v1/",
    "/v1/chat/completions/",
    "/v1/models/x",
    "/v1/models/merged",
    "/v1/models/%00",
    "/v1/embeddings",
    "/v1//models",
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST")
TYPES = (
    "text/plain",
    "application/xml",
    "",
    "application/json; charset=utf-16",
    "multipart/form-data",
    "application/x-www-form-urlencoded",
)
FOREIGN_HOSTS = (
    *(
        "http://evil.example",
        "evil.example",
        "null",
        "127.0.0.1.evil.example",
        "http://localhost.evil.example",
        "127.0.0.2",
        "[::1]:x",
    ),
    *("http://127.0.0.1@evil.example", "localhost:80:80", "LOCALHOST.", " ", "http://evil.example:8000"),
)
"""Hosts and origins that are not this machine's."""


def field_at_edge(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    return {**body, rng.choice(FIELDS): rng.choice(EDGES)}


def field_of_another(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A field of another valid request."""
    _, other = rng.choice(GOOD)
    key = rng.choice(list(other))
    return {**body, key: other[key]}


OPERATORS = (*mutation.VALUES, *mutation.KEYS, *[field_at_edge] * 6, *[field_of_another] * 2)


@cache
def client() -> TestClient:
    """A client of the application over a tiny random policy, as `python -m stages.serving` makes it."""
    folder = tempfile.TemporaryDirectory()
    path = make_tiny_policy(Path(folder.name) / "policy")
    policy = load_policy(path)
    chat = Chat(policy.tokenizer)
    engine = TorchEngine(policy.model, [chat.end_of_turn], slots=16, max_length=MAX_LENGTH)
    turns = EngineThread(BestOfEngine(engine, 1, by_logprob, lambda tokens: action_key(chat.action_text(tokens))))
    names = {"merged": PLAIN, "merged+logprob": Variant(3, lambda: by_logprob), "merged+vote": Variant(3, lambda: None)}
    agent = Agent(turns, chat, names, policy_hash(path), Sampling(0.8, 0.9, 20, 8), MAX_LENGTH)
    atexit.register(turns.close)
    atexit.register(folder.cleanup)
    return TestClient(make_app(agent), base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def parse_strict_json(text: str) -> Any:
    """Standard JSON, without NaN and infinities."""

    def refuse(name: str) -> None:
        raise LostError(f"the response has the number {name}")

    return json.loads(text, parse_constant=refuse)


def check_answer(reply: httpx.Response) -> None:
    """Raise LostError for a response that does not have OpenAI's format."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        if lines[-1] != "[DONE]":
            raise LostError(f"the stream ends with {lines[-1][:80]!r}")
        parts = [parse_strict_json(line) for line in lines[:-1]]
        if not parts or not all("choices" in part for part in parts):
            raise LostError("a chunk has no choices")
        return
    value = parse_strict_json(reply.text)
    choices = value.get("choices", [])
    if not choices or not all(choice["finish_reason"] in ("stop", "length") for choice in choices):
        raise LostError(f"a response without choices: {reply.text[:120]}")
    for choice in choices:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        if not isinstance(text, str):
            raise LostError(f"a choice has the text {text!r}")
        given = choice["logprobs"] or {}
        for logprob in given.get("token_logprobs") or [item["logprob"] for item in given.get("content") or []]:
            if not math.isfinite(logprob) or logprob > 0:
                raise LostError(f"a token's log-probability is {logprob}")


def check_reply(reply: httpx.Response, completion: bool = True) -> Outcome:
    """The outcome of a reply; `completion`: the request was for a completion, not for a list of models."""
    if reply.status_code >= 500:
        raise LostError(f"status {reply.status_code}: {reply.text[:200]}")
    if reply.status_code >= 400:
        if reply.request.method == "HEAD":
            return Outcome(REFUSED)
        try:
            error = parse_strict_json(reply.text)["error"]
            fields = {key: error[key] for key in ("message", "type", "param", "code")}
        except (ValueError, KeyError, TypeError) as wrong:
            raise LostError(f"status {reply.status_code} without OpenAI's error: {reply.text[:120]}") from wrong
        if not fields["message"] or len(fields["message"]) > 4000:
            raise LostError(f"an error of {len(fields['message'])} characters")
        return Outcome(REFUSED, fields["message"])
    if reply.status_code != 200:
        raise LostError(f"status {reply.status_code}")
    if completion:
        check_answer(reply)
    return Outcome(ACCEPTED)


@cache
def expected_choices() -> Any:
    return parse_strict_json(client().post(CHAT, json=GOOD[0][1]).text)["choices"]


def check_recovery() -> None:
    """Raise LostError unless the server still gives the expected response to a valid request."""
    expected = expected_choices()
    reply = client().post(CHAT, json=GOOD[0][1])
    if reply.status_code != 200 or parse_strict_json(reply.text)["choices"] != expected:
        raise LostError(f"afterwards a valid request gets {reply.status_code}: {reply.text[:120]}")


def send(method: str, path: str, content: bytes, headers: dict[str, Any]) -> Outcome:
    expected_choices()
    reply = client().request(method, path, content=content, headers=headers)
    outcome = check_reply(reply, completion=method == "POST" and path in (CHAT, COMPLETIONS))
    check_recovery()
    return outcome


def case(seed: int, number: int) -> tuple[str, Outcome]:
    """(operators, outcome) of one mutated request."""
    rng = random.Random(f"requests/{seed}/{number}")
    path, body = rng.choice(GOOD)
    headers, method = {"content-type": "application/json"}, "POST"
    kind = rng.choices(("body", "bytes", "path", "header", "foreign"), (62, 22, 6, 5, 5))[0]
    if kind == "body":
        value, names = mutation.mutated(rng, body, OPERATORS, most=2)
        content = json.dumps(value).encode()
    elif kind == "bytes":
        content, names = mutation.mutated(rng, json.dumps(body).encode(), mutation.JSON_BYTES, most=2)
    else:
        content = json.dumps(body).encode()
        if kind == "path":
            method, path = rng.choice(METHODS), rng.choice((*PATHS, path))
            names = f"{method} {path}"
        elif kind == "foreign":
            headers |= {rng.choice(("host", "origin")): rng.choice(FOREIGN_HOSTS)}
            names = str(headers)
        else:
            headers = {
                "content-type": rng.choice(TYPES),
                "authorization": rng.choice(("", "Bearer x", "Basic \xff")).encode("latin-1"),
            }
            names = str(headers)
    outcome = run_case(lambda: send(method, path, content, headers))
    if kind == "foreign" and outcome.kind == ACCEPTED:
        outcome = Outcome(LOST, "a foreign host or origin was answered")
    return f"{kind}: {names}", outcome if outcome.kind != LOST else Outcome(LOST, f"{path}: {outcome.detail}")
