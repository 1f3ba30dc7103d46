"""A member behind an OpenAI-compatible server (`POST /chat/completions`). Replies are stored with their requests and the
server's address, so that a run repeats without the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from stages.environments.pool.reply import NONE, Reply
from stages.environments.pool.settings import Server
from stages.records.messages import well_formed
from stages.records.reply_cache import ReplyCache
from stages.runtime.validation import shortened

LONGEST_WAIT_S = 30.0


class ServerBackend:
    """`transport`, `sleep`: replaced by tests."""

    def __init__(
        self,
        name: str,
        settings: Server,
        max_tokens: int,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name, self._settings, self._max_tokens, self._sleep = name, settings, max_tokens, sleep
        self._cache = ReplyCache(Path(settings.cache) if settings.cache else None)
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx.Client(
            base_url=settings.base_url.rstrip("/") + "/",
            timeout=settings.timeout_s,
            transport=transport,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def ask(self, question: str) -> Reply:
        """A question that the server rejects has the reply None. Raises RuntimeError if no attempt was answered."""
        content = self._settings.prompt.replace("{question}", question)
        request: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
        }
        # Servers that run one model each often all call it "model".
        kept = {"base_url": self._settings.base_url.rstrip("/"), **request}
        return Reply(**self._cache.once(kept, lambda: asdict(self._sent(request))))

    def _sent(self, request: dict[str, Any]) -> Reply:
        why = ""
        for attempt in range(self._settings.attempts):
            if attempt:
                self._sleep(min(2.0 ** (attempt - 1), LONGEST_WAIT_S))
            try:
                answer = self._client.post("chat/completions", json=request)
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code in (401, 403, 404):
                raise self._failure(f"HTTP {answer.status_code}: {shortened(answer.text)}")
            if answer.status_code == 429 or answer.status_code >= 500:
                why = f"HTTP {answer.status_code}"
                continue
            if answer.status_code >= 400:
                return Reply(NONE, 0)
            try:
                body = answer.json()
                text = body["choices"][0]["message"].get("content") or ""
                tokens = (body.get("usage") or {}).get("completion_tokens")
                text = well_formed(text)
                return Reply(" ".join(text.split()) or NONE, len(text.split()) if tokens is None else int(tokens))
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                why = f"no chat completion ({error!r})"
        raise self._failure(why)

    def _failure(self, why: str) -> RuntimeError:
        settings = self._settings
        return RuntimeError(
            f"pool member {self._name}: the server at {settings.base_url} does not answer for model {settings.model!r} ({why}); "
            f"start it or correct base_url and model, and run the stage again"
        )
