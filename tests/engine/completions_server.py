"""Stub of vLLM's completions server over the torch engine; it returns token ids and log-probs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine


def complete(engine: TorchEngine, body: dict[str, Any]) -> dict[str, Any]:
    """One completion in vLLM's format; the seed is the turn's key."""
    session = engine.open(body["prompt"])
    engine.request(session, body["seed"], Sampling(body["temperature"], body["top_p"], body.get("top_k", 0), body["max_tokens"]))
    (turn,) = engine.advance()
    engine.close(session)
    logprobs = {"token_logprobs": turn.logprobs, "tokens": [f"<{token}>" for token in turn.token_ids]}
    reason = "stop" if turn.stop_reason == "stop" else "length"
    return {"index": 0, "text": "", "finish_reason": reason, "logprobs": logprobs, "token_ids": turn.token_ids}


@contextmanager
def serving(
    engine: TorchEngine, change: Callable[[dict[str, Any]], dict[str, Any]] = lambda choice: choice
) -> Iterator[SimpleNamespace]:
    """`base_url` and the request bodies so far; `change` is applied to each choice before it is sent."""
    lock, bodies = threading.Lock(), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                bodies.append(body)
                choice = change(complete(engine, body))
            reply = {"id": "1", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice]}
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{server.server_port}/v1", bodies=bodies)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
