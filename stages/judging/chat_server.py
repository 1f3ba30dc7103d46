"""Texts from a chat model behind an OpenAI-compatible server (`POST /chat/completions`), each stored with its whole request.

A run whose requests are stored needs no server, and gives the same bytes. What a model refuses to write is None and is stored,
too; a server that does not answer ends the run with JudgeError, and nothing is stored for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from stages.judging.chat_settings import ChatParams
from stages.judging.completions import post, read
from stages.judging.contract import JudgeError
from stages.judging.server import LONGEST_WAIT_S
from stages.judging.settings import LONGEST_ASKED_S
from stages.records.reply_cache import ReplyCache, request_key
from stages.runtime.validation import shortened

AGAIN = (408, 425, 429)
"""HTTP statuses that pass, beside those from 500 on."""
Messages = Sequence[Mapping[str, str]]


class ChatServer:
    """See the module. key: of the settings, for messages ("rl.guidance.server"); root: the repository, for the stored replies;
    transport, sleep: replaced by tests."""

    def __init__(
        self,
        params: ChatParams,
        key: str,
        root: Path,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.params, self.key, self._sleep = params, key, sleep
        self.cache = ReplyCache(root / params.cache if params.cache else None)
        token = os.environ.get("OPENAI_API_KEY")
        self._client = httpx.Client(
            base_url=params.base_url.rstrip("/") + "/",
            timeout=params.timeout_s,
            transport=transport,
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        self._workers = ThreadPoolExecutor(params.requests, thread_name_prefix="chat")

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def request(self, messages: Messages, seed: int = 0) -> dict[str, Any]:
        """The body of the request; equal messages with another seed are another request."""
        params = self.params
        return {
            "model": params.model,
            "messages": [dict(message) for message in messages],
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "seed": seed,
        }

    def write(self, conversations: Sequence[Messages], seeds: Sequence[int] | None = None) -> list[str | None]:
        """The reply to each conversation; None where the model refuses, or the server rejects the request. seeds: of the
        requests, one each; None: 0, so that equal conversations are asked once.

        Raises JudgeError if the server rejects the key, address or model, or does not answer in `attempts` attempts.
        """
        asked = [0] * len(conversations) if seeds is None else seeds
        bodies = [self.request(messages, seed) for messages, seed in zip(conversations, asked, strict=True)]
        futures = {key: self._workers.submit(self._text, body) for key, body in {request_key(one): one for one in bodies}.items()}
        return [futures[request_key(body)].result() for body in bodies]

    def _text(self, body: Mapping[str, Any]) -> str | None:
        text: str | None = self.cache.once(body, lambda: {"text": self._asked(body)})["text"]
        return text

    def _asked(self, body: Mapping[str, Any]) -> str | None:
        problem, wait, made = "", 0.0, 0
        for attempt in range(self.params.attempts):
            if wait > LONGEST_ASKED_S:
                problem += f" that asks for a pause of {wait:g} s, and at most {LONGEST_ASKED_S:g} s are waited for"
                break
            if attempt:
                self._sleep(wait)
            wait, made = min(self.params.wait_s * 2**attempt, LONGEST_WAIT_S), attempt + 1
            try:
                reply = post(self._client, body, self.params.timeout_s)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if (why := reply.hopeless) is not None:
                model = f"model {self.params.model!r}"
                raise JudgeError(f"{self.key}: the server at {self.params.base_url} answers {reply.status} for {model}: {why}")
            if reply.status in AGAIN or reply.status >= 500:
                problem, wait = f"HTTP {reply.status}", wait if reply.wait is None else reply.wait
                continue
            if reply.status >= 400:
                return None
            try:
                found = read(reply.text)
                return None if found.refusal else found.text or None
            except ValueError as error:
                problem = f"{error}: {shortened(reply.text)}"
        raise JudgeError(
            f"{self.key}: no reply in {made} attempts, the last with {problem}, at {self.params.base_url}; what was written is "
            f"kept: start the server, or set base_url, and run the stage again"
        )
