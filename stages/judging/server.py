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

from stages.judging.completions import Reply, ServerError, post, read
from stages.judging.contract import Cost, JudgeError, Judgment, Question, Status, digest
from stages.judging.replies import messages, parse, schema
from stages.judging.settings import ServerParams
from stages.records.reply_cache import ReplyCache, request_key
from stages.runtime.validation import shortened

LONGEST_WAIT_S = 30.0
TRANSIENT = {Status.TIMEOUT, Status.RATE_LIMIT, Status.UNAVAILABLE}
"""Failures of the server, not of the question."""
STATUSES = {408: Status.TIMEOUT, 425: Status.UNAVAILABLE, 429: Status.RATE_LIMIT}
"""HTTP statuses that pass; those from 500 on are UNAVAILABLE, other ones from 400 on REJECTED."""


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
        keys = [request_key(self.request(question)) for question in questions]
        found: dict[str, Judgment] = {}
        waiting = list(dict(zip(keys, questions, strict=True)).items())
        unanswered: list[tuple[Question, Judgment]] = []
        while waiting:
            room = self._room()
            if room == 0:
                found |= {key: Judgment(status=Status.BUDGET, cost=Cost()) for key, _ in waiting}
                break
            size = self.params.requests if room is None else min(self.params.requests, room)
            chunk, waiting = waiting[:size], waiting[size:]
            attempts = self.params.attempts if room is None else min(self.params.attempts, max(1, room // len(chunk)))
            futures = [self._workers.submit(self._judgment, question, attempts) for _, question in chunk]
            for (key, question), future in zip(chunk, futures, strict=True):
                judgment, asked = future.result()
                found[key] = judgment
                self.spent += judgment.cost
                if asked:
                    unanswered = self._note(question, judgment, unanswered)
        for question, judgment in unanswered:
            self._store(question, judgment)
        return [found[key] for key in keys]

    def _room(self) -> int | None:
        """How many requests the budget still allows; None for any number."""
        params = self.params
        if params.max_money is not None and self.spent.money >= params.max_money:
            return 0
        return None if params.max_calls is None else max(0, params.max_calls - self.spent.calls)

    def _note(
        self, question: Question, judgment: Judgment, unanswered: list[tuple[Question, Judgment]]
    ) -> list[tuple[Question, Judgment]]:
        """What no server has answered since its last answer, with which it is stored: giving up leaves it to be asked anew."""
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
        for earlier in unanswered:
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

    def _judgment(self, question: Question, attempts: int) -> tuple[Judgment, bool]:
        """The judgment, stored at once if the server answered, and whether it was asked now."""
        request = self.request(question)
        stored = self.cache.load(request)
        if stored is not None and (stored["status"] == Status.OK or not self.params.ask_failed_again):
            calls, tokens_in, tokens_out = stored["cost"]
            cost = Cost(calls, tokens_in, tokens_out, self._price(tokens_in, tokens_out))
            return Judgment(tuple(stored["scores"]), stored["reason"], Status(stored["status"]), cost), False
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
        if judgment.status not in TRANSIENT:
            self._store(question, judgment)
        return judgment, True

    def _attempt(self, question: Question, request: Mapping[str, Any]) -> tuple[Judgment, float | None]:
        """One request: its judgment, and the pause that the server asked for."""
        with self._lock:
            self.sent += 1
        once = Cost(calls=1)
        try:
            reply = post(self._client, request, self.params.timeout_s)
        except httpx.TimeoutException as error:
            return Judgment(reason=f"{type(error).__name__}: {error}", status=Status.TIMEOUT, cost=once), None
        except httpx.HTTPError as error:
            return Judgment(reason=f"{type(error).__name__}: {error}", status=Status.UNAVAILABLE, cost=once), None
        if (why := reply.hopeless) is not None:
            raise JudgeError(
                f"the judge's server at {self.params.base_url} answers {reply.status} for model {self.params.model!r}: {why} "
                f"(rl.judge.server)"
            )
        if reply.status < 400:
            return self._read(question, reply)
        said = f"HTTP {reply.status}"
        if (status := STATUSES.get(reply.status, Status.UNAVAILABLE if reply.status >= 500 else None)) is not None:
            return Judgment(reason=said, status=status, cost=once), reply.wait
        status = Status.REFUSAL if reply.refused else Status.REJECTED
        return Judgment(reason=f"{said}: {shortened(reply.text)}", status=status, cost=once), None

    def _read(self, question: Question, reply: Reply) -> tuple[Judgment, float | None]:
        try:
            found = read(reply.text)
        except ServerError as error:
            status = STATUSES.get(error.code, Status.UNAVAILABLE)
            return Judgment(reason=str(error), status=status, cost=Cost(calls=1)), reply.wait
        except ValueError as error:
            return Judgment(reason=str(error), status=Status.NONSENSE, cost=Cost(calls=1)), None
        cost = Cost(1, found.tokens_in, found.tokens_out, self._price(found.tokens_in, found.tokens_out))
        if found.refusal:
            return Judgment(reason=found.refusal, status=Status.REFUSAL, cost=cost), None
        try:
            scores, reason = parse(question, found.text)
        except ValueError as error:
            why = f"{error} (cut off at max_tokens)" if found.cut else str(error)
            return Judgment(reason=f"{why}: {shortened(found.text)}", status=Status.NONSENSE, cost=cost), None
        return Judgment(scores, reason, cost=cost), None

    def _price(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self.params.price_in + tokens_out * self.params.price_out) / 1e6
