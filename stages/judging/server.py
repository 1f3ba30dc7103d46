"""A judge behind an OpenAI-compatible server (`POST /chat/completions`).

Replies are structured, with the reason before the verdict. What fails is tried again; what keeps failing is a judgment with the
status of its last attempt. Budgets count stored replies as if they were asked, so that a repetition stops asking where the first
run did, and ends in the same bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import httpx

from stages.judging.contract import Cost, JudgeError, Judgment, Question, Status, digest
from stages.judging.replies import messages, parse, schema
from stages.judging.settings import ServerParams
from stages.runtime.reply_cache import ReplyCache
from stages.runtime.validation import shortened

LONGEST_WAIT_S = 30.0
TRANSIENT = {Status.TIMEOUT, Status.RATE_LIMIT, Status.UNAVAILABLE}
"""Failures of the server, not of the question."""
WRONG_SETUP = {
    401: "it rejects the key in the environment variable OPENAI_API_KEY",
    403: "it denies access",
    404: "it has no such address or model; check rl.judge.server.base_url and model",
}
"""HTTP statuses with which no further question could pass."""


class ServerJudge:
    """See the module. `root`: the repository, for the cache; `transport`, `sleep`: replaced by tests."""

    name = "server"

    def __init__(
        self,
        params: ServerParams,
        root: Path,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.params, self._sleep = params, sleep
        self.cache = ReplyCache(root / params.cache if params.cache else None)
        self.version = digest([params.model, params.temperature, params.max_tokens, params.structured])[:16]
        self.spent = Cost()
        """Of all judgments so far, stored ones included; part of checkpoints."""
        self.sent = 0
        """Requests that this process sent."""
        self._lock = Lock()
        self._in_a_row = 0
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx.Client(
            base_url=params.base_url.rstrip("/") + "/",
            timeout=params.timeout_s,
            transport=transport,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        self._workers = ThreadPoolExecutor(params.requests, thread_name_prefix="judge")

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def request(self, question: Question) -> dict[str, Any]:
        """The body of the request. A repeated question differs in its seed."""
        params = self.params
        body: dict[str, Any] = {
            "model": params.model,
            "messages": messages(question),
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "seed": question.repeat,
        }
        if params.structured:
            form = {"name": "verdict", "strict": True, "schema": schema(question)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body

    def judge(self, questions: Sequence[Question]) -> list[Judgment]:
        """See `Judge.judge`. Raises JudgeError if the server rejects the key, address or model, and after
        `give_up_after` judgments in a row that no server answered."""
        found: dict[str, Judgment] = {}
        waiting = list({question.key: question for question in questions}.values())
        unanswered: list[tuple[Question, Judgment]] = []
        while waiting:
            room = self._room()
            if room == 0:
                found |= {question.key: Judgment(status=Status.BUDGET, cost=Cost()) for question in waiting}
                break
            size = self.params.requests if room is None else min(self.params.requests, room)
            chunk, waiting = waiting[:size], waiting[size:]
            attempts = self.params.attempts if room is None else min(self.params.attempts, max(1, room // len(chunk)))
            for question, judgment in zip(chunk, self._chunk(chunk, attempts), strict=True):
                found[question.key] = judgment
                self.spent += judgment.cost
                unanswered = self._note(question, judgment, unanswered)
        for question, judgment in unanswered:
            self._store(question, judgment)
        return [found[question.key] for question in questions]

    def _room(self) -> int | None:
        """How many requests the budget still allows; None for any number."""
        params = self.params
        if params.max_money is not None and self.spent.money >= params.max_money:
            return 0
        return None if params.max_calls is None else max(0, params.max_calls - self.spent.calls)

    def _note(
        self, question: Question, judgment: Judgment, unanswered: list[tuple[Question, Judgment]]
    ) -> list[tuple[Question, Judgment]]:
        """Store a judgment. What no server answered is stored with the next answer: giving up leaves it to be asked anew."""
        if judgment.status in TRANSIENT:
            self._in_a_row += 1
            if self._in_a_row >= self.params.give_up_after:
                raise JudgeError(
                    f"rl.judge.server: {self._in_a_row} judgments in a row failed, the last with {judgment.status} "
                    f"({judgment.reason}), at {self.params.base_url}; what was judged is kept: start the server, or set base_url "
                    f"and run the stage again"
                )
            return [*unanswered, (question, judgment)]
        self._in_a_row = 0
        for earlier in (*unanswered, (question, judgment)):
            self._store(*earlier)
        return []

    def _store(self, question: Question, judgment: Judgment) -> None:
        cost = judgment.cost
        outcome = {
            "status": judgment.status.value,
            "scores": list(judgment.scores),
            "reason": judgment.reason,
            "cost": [cost.calls, cost.tokens_in, cost.tokens_out],
        }
        self.cache.store(self.request(question), outcome)

    def _chunk(self, questions: Sequence[Question], attempts: int) -> list[Judgment]:
        futures = [self._workers.submit(self._judgment, question, attempts) for question in questions]
        return [future.result() for future in futures]

    def _judgment(self, question: Question, attempts: int) -> Judgment:
        request = self.request(question)
        stored = self.cache.load(request)
        if stored is not None and (stored["status"] == Status.OK or not self.params.ask_failed_again):
            calls, tokens_in, tokens_out = stored["cost"]
            cost = Cost(calls, tokens_in, tokens_out, self._price(tokens_in, tokens_out))
            return Judgment(tuple(stored["scores"]), stored["reason"], Status(stored["status"]), cost)
        cost = Cost()
        for attempt in range(attempts):
            # A model that wrote nonsense gets another draw.
            made, wait = self._attempt(question, {**request, "seed": request["seed"] + 1000 * attempt})
            cost += made.cost
            # From the sums, as for a stored reply: the sum of the attempts' prices may differ in the last bit.
            cost = replace(cost, money=self._price(cost.tokens_in, cost.tokens_out))
            judgment = Judgment(made.scores, made.reason, made.status, cost)
            if made.status in (Status.OK, Status.REFUSAL, Status.REJECTED):
                break
            if attempt + 1 < attempts and made.status in TRANSIENT:
                growing = min(self.params.wait_s * 2**attempt, LONGEST_WAIT_S)
                self._sleep(growing if wait is None else min(wait, LONGEST_WAIT_S))
        return judgment

    def _attempt(self, question: Question, request: Mapping[str, Any]) -> tuple[Judgment, float | None]:
        """One request: its judgment, and the pause that the server asked for."""
        with self._lock:
            self.sent += 1
        once = Cost(calls=1)
        try:
            reply = self._client.post("chat/completions", json=request)
        except httpx.TimeoutException as error:
            return Judgment(reason=type(error).__name__, status=Status.TIMEOUT, cost=once), None
        except httpx.HTTPError as error:
            return Judgment(reason=f"{type(error).__name__}: {error}", status=Status.UNAVAILABLE, cost=once), None
        if reply.status_code in WRONG_SETUP:
            raise JudgeError(
                f"the judge's server at {self.params.base_url} answers {reply.status_code} for model "
                f"{self.params.model!r}: {WRONG_SETUP[reply.status_code]}"
            )
        if reply.status_code == 429 or reply.status_code >= 500:
            status = Status.RATE_LIMIT if reply.status_code == 429 else Status.UNAVAILABLE
            return Judgment(reason=f"HTTP {reply.status_code}", status=status, cost=once), retry_after(reply)
        if reply.status_code >= 400:
            why = f"HTTP {reply.status_code}: {shortened(reply.text)}"
            return Judgment(reason=why, status=Status.REJECTED, cost=once), None
        return self._read(question, reply), None

    def _read(self, question: Question, reply: httpx.Response) -> Judgment:
        try:
            body = reply.json()
            choice, usage = body["choices"][0], body.get("usage") or {}
            message = choice["message"]
            text = message.get("content") or ""
            tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Judgment(reason=f"no chat completion ({error!r})", status=Status.NONSENSE, cost=Cost(calls=1))
        cost = Cost(1, *tokens, self._price(*tokens))
        if message.get("refusal") or choice.get("finish_reason") == "content_filter":
            return Judgment(reason=str(message.get("refusal") or "content filter"), status=Status.REFUSAL, cost=cost)
        try:
            scores, reason = parse(question, text)
        except ValueError as error:
            return Judgment(reason=f"{error}: {shortened(text)}", status=Status.NONSENSE, cost=cost)
        return Judgment(scores, reason, cost=cost)

    def _price(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self.params.price_in + tokens_out * self.params.price_out) / 1e6


def retry_after(reply: httpx.Response) -> float | None:
    """Seconds in the header Retry-After; None without one, or for a date."""
    try:
        return max(0.0, float(reply.headers.get("retry-after", "")))
    except ValueError:
        return None
