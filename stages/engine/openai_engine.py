"""Generation by an OpenAI-compatible server, through its completions endpoint (`POST /v1/completions`).

Episodes record tokens with their sampling log-probabilities, so a server that does not return both is rejected. With `text`, a
server that returns only text is accepted for evaluate, which needs the actions alone: the text is encoded here, and
log-probabilities are NaN.

Each request carries a seed derived from the turn's key; reproducibility is up to the server. vLLM seeds a generator per request
and repeats tokens as far as its kernels are batch-invariant; `transformers serve` seeds its whole process and repeats a run only
with one request at a time (`resources.engine.requests: 1`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from stages.engine.completion_engine import TurnRequest, TurnResult
from stages.engine.engine import EngineError, Pause

TIMEOUT_S = 600.0
PAUSE_S = 0.1
"""Interval at which `Pause` is polled while requests are running."""
RETRIES = 4
"""Retries after connection errors and statuses 429 and 5xx, with growing delays."""
TOKEN_ID = "token_id:"
"""Prefix that some servers use to return token ids instead of the tokens' text."""


def seed_of(key: int) -> int:
    """A request's seed: 31 bits of the turn's key, which every server accepts."""
    return key % 2**31


def request_fields(request: TurnRequest, dialect: str, end_of_turn: int, pad: int) -> dict[str, Any]:
    """Request fields besides model and prompt; those beyond OpenAI's API are in `extra_body`.

    Raises EngineError for a sampling setting that the dialect can't express.
    """
    sampling = request.sampling
    fields: dict[str, Any] = {"max_tokens": sampling.max_tokens, "top_p": sampling.top_p, "seed": seed_of(request.key)}
    if dialect == "transformers":
        # It samples only if a complete generation_config says so, and rejects unknown fields.
        extra: dict[str, Any] = {
            "do_sample": sampling.temperature > 0,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_tokens,
            "eos_token_id": end_of_turn,
            "pad_token_id": pad,
        }
        if sampling.temperature > 0:
            fields["temperature"] = sampling.temperature
        return {**fields, "logprobs": 1, "extra_body": {"generation_config": json.dumps(extra, sort_keys=True)}}
    fields |= {"temperature": sampling.temperature, "logprobs": 1}
    if dialect == "vllm":
        fields["extra_body"] = {
            "top_k": sampling.top_k,
            "stop_token_ids": [end_of_turn],
            "ignore_eos": True,  # a model may have several eos tokens; turns end with this one only
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
    elif sampling.top_k:
        raise EngineError(
            f"top_k is {sampling.top_k}, which OpenAI's API does not support; set it to 0 in the stage's `sampling`, or set "
            "resources.engine.dialect to vllm if the server supports it"
        )
    return fields


def parse_choice(choice: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and log-probabilities of a completion's choice. Raises EngineError if the server did not return them.

    Ids come from `token_ids` (vLLM, SGLang), tokens written `token_id:N`, or `logprobs.content[].id` (llama.cpp).
    """
    logprobs = choice.logprobs
    if logprobs is None:
        raise EngineError("the server returned no log-probabilities")
    content = getattr(logprobs, "content", None)
    ids: list[Any] | None
    values: list[Any]
    if content:
        entries = [entry if isinstance(entry, dict) else entry.__dict__ for entry in content]
        ids, values = [entry.get("id") for entry in entries], [entry.get("logprob") for entry in entries]
    else:
        values = list(logprobs.token_logprobs or ())
        ids = getattr(choice, "token_ids", None)
        tokens = logprobs.tokens or ()
        if ids is None and tokens and all(token.startswith(TOKEN_ID) for token in tokens):
            ids = [int(token.removeprefix(TOKEN_ID)) for token in tokens]
    if ids is None or any(token is None for token in ids):
        raise EngineError("the server returned tokens as text, without their ids")
    if len(ids) != len(values) or any(value is None for value in values):
        raise EngineError(f"the server returned {len(ids)} token ids but {len(values)} log-probabilities")
    return tuple(int(token) for token in ids), tuple(float(value) for value in values)


class OpenAIBackend:
    """A `Backend`. client: an `openai.OpenAI`; model: its name at the server; dialect: "openai", "vllm" or "transformers", for
    fields beyond OpenAI's; text: accept text without token ids; requests: maximum in flight."""

    def __init__(
        self, client: Any, model: str, tokenizer: Any, end_of_turn: int, *, dialect: str, text: bool, requests: int
    ) -> None:
        self.client, self.model, self.tokenizer, self.end_of_turn = client, model, tokenizer, end_of_turn
        self.dialect, self.text = dialect, text
        self._workers = ThreadPoolExecutor(requests, thread_name_prefix="requests")
        self._running: dict[int, Future[TurnResult]] = {}
        """Requests in flight, by session."""
        self._added = list(tokenizer("")["input_ids"])
        self._pad = end_of_turn if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)

    def start(self, request: TurnRequest) -> None:
        self._running[request.session] = self._workers.submit(self._complete, request)

    def wait(self, pause: Pause | None = None) -> list[TurnResult]:
        done: set[Future[TurnResult]] = set()
        while self._running and not done and not (pause and pause()):
            done, _ = wait(self._running.values(), PAUSE_S if pause else None, FIRST_COMPLETED)
        results = [future.result() for future in done]
        for result in results:
            del self._running[result.session]
        return results

    def cancel(self, sessions: Collection[int]) -> None:
        """See `Backend.cancel`. Requests in flight continue at the server; their replies are dropped."""
        for future in (self._running.pop(session, None) for session in sessions):
            if future is not None:
                future.cancel()

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
        self.client.close()

    def _complete(self, request: TurnRequest) -> TurnResult:
        import openai

        fields = request_fields(request, self.dialect, self.end_of_turn, self._pad)
        try:
            reply = self.client.completions.create(model=self.model, prompt=self._prompt(request.token_ids), **fields)
        except openai.APIConnectionError as error:
            raise ConnectionError(
                f"no server answers at resources.engine.base_url {self.client.base_url} ({error}); start one, or set "
                "resources.engine.kind to torch"
            ) from error
        except openai.APIStatusError as error:
            # Overload and server errors may pass (ConnectionError: worth retrying later); a rejected request stays rejected.
            transient = error.status_code >= 500 or error.status_code == 429
            raise (ConnectionError if transient else EngineError)(
                f"the server at {self.client.base_url} rejected a completion by model {self.model!r} with status "
                f"{error.status_code}: {error.message}. Check that it serves that model (`curl .../models`) and that "
                f"resources.engine.dialect ({self.dialect}) matches the server"
            ) from error
        choice = reply.choices[0]
        if self.text:
            return self._text_result(request, choice)
        return self._token_result(request, choice)

    def _prompt(self, token_ids: Sequence[int]) -> Any:
        """Token ids; for `transformers serve`, text without the prefix that its tokenizer adds."""
        if self.dialect != "transformers":
            return list(token_ids)
        start = len(self._added) if list(token_ids[: len(self._added)]) == self._added else 0
        return self.tokenizer.decode(list(token_ids[start:]), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _token_result(self, request: TurnRequest, choice: Any) -> TurnResult:
        stopped = choice.finish_reason == "stop"
        try:
            ids, logprobs = parse_choice(choice)
            if stopped and (not ids or ids[-1] != self.end_of_turn):
                raise EngineError(f"the server omitted the end-of-turn token {self.end_of_turn} or stopped at another one")
        except EngineError as error:
            raise EngineError(
                f"{error} (model {self.model!r} at {self.client.base_url}, dialect {self.dialect}). Episodes record every token "
                "with its sampling log-probability: use a server that returns them (vLLM with dialect vllm), or set "
                "resources.engine.kind to torch or vllm. For evaluate, which needs only text, resources.engine.text: true "
                "accepts this server"
            ) from error
        return TurnResult(request.session, ids, logprobs, stopped)

    def _text_result(self, request: TurnRequest, choice: Any) -> TurnResult:
        stopped = choice.finish_reason == "stop"
        room = request.sampling.max_tokens - stopped
        ids = list(self.tokenizer.encode(choice.text, add_special_tokens=False))[:room]
        ids += [self.end_of_turn] if stopped else []
        return TurnResult(request.session, tuple(ids), (math.nan,) * len(ids), stopped)


def make_client(base_url: str) -> Any:
    """An `openai.OpenAI` for `base_url`, with the API key of OPENAI_API_KEY if set. Raises EngineError without the package."""
    try:
        import openai
    except ImportError as error:
        raise EngineError(
            "resources.engine.kind openai needs the package openai: pip install 'bellwether[openai]', or set kind to torch"
        ) from error
    key = os.environ.get("OPENAI_API_KEY", "none")
    return openai.OpenAI(base_url=base_url, api_key=key, timeout=TIMEOUT_S, max_retries=RETRIES)
