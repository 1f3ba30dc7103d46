"""A judge behind an OpenAI-compatible server (`POST /chat/completions`).

Replies are structured, with the reason before the verdict. What fails is tried again; what keeps failing is a judgment with the
status of its last attempt.

Budgets are accounted in the order of the questions, with a worst case set aside for each attempt: max_tokens written, and as many
tokens read as the request has characters of JSON, which is more than any tokenizer makes of it. An attempt that could exceed the
budget is not made, and a question is sent beside others only if all of them fit in any case, so that neither the number of
requests in flight nor the order of replies bears on what is asked. Stored replies count as if they were asked: a repetition stops
asking where the first run did, and ends in the same bytes. What a server bills for a request without a reply is not known here.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
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
"""Of the pauses that grow with each attempt; a server's Retry-After has `longest_wait_s`."""
TRANSIENT = {Status.TIMEOUT, Status.RATE_LIMIT, Status.UNAVAILABLE}
"""Failures of the server, not of the question."""
STATUSES = {408: Status.TIMEOUT, 425: Status.UNAVAILABLE, 429: Status.RATE_LIMIT}
"""HTTP statuses that pass; those from 500 on are UNAVAILABLE, other ones from 400 on REJECTED."""


@dataclass(frozen=True)
class _InFlight:
    """A question that a worker is asking; `most`: what its judgment can cost."""

    key: str
    question: Question
    future: Future[tuple[Judgment, bool]]
    most: Cost


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
        self._unanswered: list[tuple[Question, Judgment]] = []
        """Failures of the server since its last answer."""
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

    def keep(self) -> None:
        """See `Judge.keep`: store what no server has answered since its last answer."""
        for earlier in self._unanswered:
            self._store(*earlier)
        self._unanswered = []

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
        """See `Judge.judge`. Equal questions are asked once, and the first of them has the cost. Raises JudgeError if the server
        rejects the key, address or model, and after `give_up_after` judgments in a row that no server answered; failures since
        `keep` or the last answer are then asked anew."""
        keys = [request_key(self.request(question)) for question in questions]
        found = self._asked(dict(zip(keys, questions, strict=True)).items())
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        return [found[key] if first[key] == place else replace(found[key], cost=Cost()) for place, key in enumerate(keys)]

    def _asked(self, questions: Iterable[tuple[str, Question]]) -> dict[str, Judgment]:
        """The judgment of each question, by its key."""
        found: dict[str, Judgment] = {}
        flying: deque[_InFlight] = deque()
        for key, question in questions:
            once = self._at_most(question)
            most = sum([once] * self.params.attempts, Cost())
            while flying and (len(flying) == self.params.requests or not self._fits(flying, most)):
                self._settle(flying.popleft(), found)
            # Alone, a question may have as many attempts as fit; beside others only if all of its attempts do.
            left = None if self._fits(flying, most) else self._left()
            if left is not None and not _within(once, left):
                why = "max_calls is spent" if not left.calls else f"max_money leaves {left.money:.4g}"
                found[key] = Judgment(reason=f"{why}; a request may cost {once.money:.4g}", status=Status.BUDGET, cost=Cost())
                continue
            flying.append(_InFlight(key, question, self._workers.submit(self._judgment, question, once, left), most))
        while flying:
            self._settle(flying.popleft(), found)
        return found

    def _settle(self, asked: _InFlight, found: dict[str, Judgment]) -> None:
        """Wait for a judgment, and account for it."""
        judgment, fresh = asked.future.result()
        found[asked.key] = judgment
        self.spent += judgment.cost
        if fresh:
            self._note(asked.question, judgment)

    def _at_most(self, question: Question) -> Cost:
        """What one attempt can cost; see the module."""
        read = len(json.dumps(self.request(question)))
        return Cost(1, read, self.params.max_tokens, self._price(read, self.params.max_tokens))

    def _left(self) -> Cost:
        """Calls and money that the budget leaves; without one, more than any question takes."""
        params, endless = self.params, 2**62
        calls = endless if params.max_calls is None else max(0, params.max_calls - self.spent.calls)
        money = float(endless) if params.max_money is None else max(0.0, params.max_money - self.spent.money)
        return Cost(calls=calls, money=money)

    def _fits(self, flying: Iterable[_InFlight], most: Cost) -> bool:
        """Whether a judgment that costs `most` is within the budget, whatever those in flight cost."""
        return _within(sum((one.most for one in flying), most), self._left())

    def _note(self, question: Question, judgment: Judgment) -> None:
        """What no server has answered is stored with its next answer: giving up leaves it to be asked anew."""
        if judgment.status not in TRANSIENT:
            self._in_a_row = 0
            self.keep()
            return
        self._in_a_row += 1
        self._unanswered.append((question, judgment))
        if self._in_a_row >= self.params.give_up_after:
            raise JudgeError(
                f"rl.judge.server: {self._in_a_row} judgments in a row failed, the last with {judgment.status} "
                f"({judgment.reason}), at {self.params.base_url}; what was judged is kept, and what failed since the last answer "
                f"or checkpoint is asked anew: start the server, or set base_url, and run the stage again"
            )

    def _store(self, question: Question, judgment: Judgment) -> None:
        cost = judgment.cost
        outcome = {
            "status": judgment.status.value,
            "scores": list(judgment.scores),
            "reason": judgment.reason,
            "cost": [cost.calls, cost.tokens_in, cost.tokens_out],
        }
        self.cache.store(self.request(question), outcome)

    def _judgment(self, question: Question, once: Cost, left: Cost | None) -> tuple[Judgment, bool]:
        """The judgment, stored at once if the server answered, and whether it was asked now. `once`: what an attempt can cost;
        `left`: what all may cost, None if that is certain; it allows for at least one attempt."""
        request = self.request(question)
        stored = self.cache.load(request)
        if stored is not None and (stored["status"] == Status.OK or not self.params.ask_failed_again):
            calls, tokens_in, tokens_out = stored["cost"]
            cost = Cost(calls, tokens_in, tokens_out, self._price(tokens_in, tokens_out))
            return Judgment(tuple(stored["scores"]), stored["reason"], Status(stored["status"]), cost), False
        cost = Cost()
        for attempt in range(self.params.attempts):
            # A model that wrote nonsense gets another draw.
            made, wait = self._attempt(question, {**request, "seed": request["seed"] + 1000 * attempt})
            cost += made.cost
            # From the sums, as for a stored reply: the sum of the attempts' prices may differ in the last bit.
            cost = replace(cost, money=self._price(cost.tokens_in, cost.tokens_out))
            judgment = Judgment(made.scores, made.reason, made.status, cost)
            if made.status in (Status.OK, Status.REFUSAL, Status.REJECTED):
                break
            if attempt + 1 == self.params.attempts or (left is not None and not _within(cost + once, left)):
                break
            if made.status in TRANSIENT:
                if wait is not None and wait > self.params.longest_wait_s:
                    asks = f"it asks for a pause of {wait:g} s, and longest_wait_s is {self.params.longest_wait_s:g}"
                    judgment = replace(judgment, reason=f"{made.reason}: {asks}")
                    break
                self._sleep(min(self.params.wait_s * 2**attempt, LONGEST_WAIT_S) if wait is None else wait)
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


def _within(cost: Cost, left: Cost) -> bool:
    return cost.calls <= left.calls and cost.money <= left.money
