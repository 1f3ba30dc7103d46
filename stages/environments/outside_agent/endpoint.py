"""The endpoint that outside agents of this process talk to: OpenAI's chat completions, one address for each episode.

A request waits until the policy has answered. The stage that plays decides how the policy samples (`rl.sampling`, say), so that
fields such as `temperature` and `max_tokens` have no effect. Fields that would change what an answer means are refused by name.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stages.records.messages import Messages, plain_messages

HOST = "127.0.0.1"
LARGEST = 4 << 20
"""Bytes of a request."""
REFUSED = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "stop",
    "response_format",
    "logprobs",
    "logit_bias",
    "modalities",
)
"""Fields of a request that would change what an answer is or has."""


class RequestError(ValueError):
    """A request that can't be answered; the agent gets the message."""


@dataclass
class ChatCall:
    """A request that waits for the policy's answer."""

    messages: Messages
    model: str
    answer: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    """Gets the answer, or None if the episode is over."""


@dataclass
class Outcome:
    """What the agent reported."""

    reward: float
    terms: dict[str, float]


class Channel:
    """One episode's address, and what arrives there."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.calls: queue.SimpleQueue[ChatCall] = queue.SimpleQueue()
        self.outcome: Outcome | None = None
        self.closed = False

    @property
    def url(self) -> str:
        """For OPENAI_BASE_URL."""
        return f"http://{HOST}:{server().server_address[1]}/{self.token}/v1"

    def open(self) -> None:
        server().channels[self.token] = self

    def close(self) -> None:
        """End all waiting requests, and take no more."""
        self.closed = True
        server().channels.pop(self.token, None)
        while not self.calls.empty():
            self.calls.get().answer.put(None)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.channels: dict[str, Channel] = {}


@cache
def server() -> _Server:
    """This process's server, started when it is first needed; its threads end with the process."""
    found = _Server()
    threading.Thread(target=found.serve_forever, name="outside agents", daemon=True).start()
    return found


def chat_call(body: Any) -> ChatCall:
    """The request in a body. Raises RequestError if it is not supported."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    given = [name for name in REFUSED if body.get(name) not in (None, [], {}, False, "none", {"type": "text"})]
    if given:
        raise RequestError(f"{', '.join(given)} not supported here; leave it out: the agent's turns are plain text")
    if body.get("n") not in (None, 1) or body.get("stream"):
        raise RequestError("one answer at a time, whole: leave out n and stream")
    try:
        messages = plain_messages(body.get("messages"))
    except ValueError as error:
        raise RequestError(str(error)) from error
    if len(messages) % 2 == 0:
        raise RequestError("messages ends with an assistant message; it must end with a user message")
    return ChatCall(messages, str(body.get("model", "")))


def outcome(body: Any) -> Outcome:
    """A reported reward with its terms, from 0 to 1. Raises RequestError for anything else."""
    terms = body.get("terms") or {} if isinstance(body, dict) else None
    values = [body.get("reward"), *terms.values()] if isinstance(terms, dict) else [None]
    if not all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values):
        raise RequestError(
            'a reward is {"reward": 0.5, "terms": {"accuracy": 1.0}} with numbers from 0 to 1; terms may be missing'
        )
    return Outcome(float(body["reward"]), {str(name): float(value) for name, value in sorted(terms.items())})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """No log: stages print their own progress."""

    def do_GET(self) -> None:
        if self.path.rstrip("/").endswith("/v1/models"):
            self._reply(
                200, {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "bellwether"}]}
            )
        else:
            self._fail(404, f"no such address: {self.path}")

    def do_POST(self) -> None:
        parts = self.path.strip("/").split("/", 1)
        server: Any = self.server
        channel: Channel | None = server.channels.get(parts[0])
        length = int(self.headers.get("Content-Length") or 0)
        if length > LARGEST:
            self.close_connection = True
            self._fail(413, f"the request exceeds {LARGEST} bytes")
            return
        raw = self.rfile.read(length)
        if channel is None or len(parts) < 2:
            self._fail(410, "this episode is over")
            return
        try:
            body = json.loads(raw)
            if parts[1] == "v1/chat/completions":
                self._chat(channel, chat_call(body))
            elif parts[1] == "v1/reward":
                channel.outcome = outcome(body)
                self._reply(200, {"status": "ok"})
            else:
                self._fail(404, f"no such address: {self.path}; there are /v1/chat/completions and /v1/reward")
        except (RequestError, json.JSONDecodeError, UnicodeDecodeError) as error:
            self._fail(400, str(error))

    def _chat(self, channel: Channel, call: ChatCall) -> None:
        channel.calls.put(call)
        if channel.closed:  # between the look-up and the put
            call.answer.put(None)
        answer = call.answer.get()
        if answer is None:
            self._fail(410, "this episode is over")
            return
        message = {"role": "assistant", "content": answer, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": 0, "model": call.model}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        self._reply(200, {**head, "choices": [choice], "usage": usage})

    def _fail(self, status: int, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self._reply(status, {"error": error})

    def _reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:  # the agent was ended meanwhile
            self.close_connection = True
