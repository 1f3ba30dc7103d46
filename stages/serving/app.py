"""FastAPI application with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models and /health."""

from __future__ import annotations

import asyncio
import difflib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from stages.agent.chat import Chat
from stages.conversion.call_log import CallLog
from stages.engine.engine import EngineError, Sampling, Turn
from stages.records.messages import Messages, plain_messages
from stages.seeding import key64
from stages.serving.engine_thread import EngineThread, GenerationJob
from stages.serving.outcomes import add_outcomes
from stages.serving.recording import Recording
from stages.serving.request_guard import RequestGuard, error_reply
from stages.serving.schemas import MAX_TURNS, ChatRequest, CompletionRequest, GenerationRequest
from stages.serving.specialists import Decision, Specialists, draws
from stages.serving.variants import Variant

SEED_BITS = 31
MAX_ERRORS = 5
"""Validation errors listed in a reply."""


class RefusedError(ValueError):
    """A request can't be answered. `param`: the field; `code`: OpenAI's error code; `status`: the HTTP status."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class GoneError(Exception):
    """The client has closed the connection."""


async def disconnected(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Agent:
    """The served model. `names`: name -> variant; `sampling`: defaults of requests; `max_length`: maximum tokens of prompt and
    answer together."""

    turns: EngineThread
    chat: Chat
    names: Mapping[str, Variant]
    policy_hash: str
    sampling: Sampling
    max_length: int
    log: CallLog | None = None
    """Where chat completions are logged, if anywhere."""
    specialists: Specialists | None = None
    """Small models that answer some chat completions, if any."""
    recording: Recording | None = None
    """Where chat completions are recorded for training, if anywhere."""

    def variant(self, name: str) -> Variant:
        if name not in self.names:
            near = difflib.get_close_matches(name, list(self.names), n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            message = f"the model '{name}' is not served here{hint} Available: {', '.join(self.names)}"
            raise RefusedError(message, "model", "model_not_found", 404)
        return self.names[name]

    def sampling_of(self, body: GenerationRequest, length: int, max_tokens: int | None) -> Sampling:
        """Sampling settings after a prompt of `length` tokens. Raises RefusedError if there is no room."""
        room = self.max_length - length
        context = f"this model's context is {self.max_length} tokens (model.max_length in params.yaml); the prompt has {length}"
        if room < 1:
            message = f"{context}, which leaves no room for an answer. Shorten it, or serve with a larger model.max_length"
            raise RefusedError(message, "messages" if isinstance(body, ChatRequest) else "prompt", "context_length_exceeded")
        if max_tokens is not None and max_tokens > room:
            message = f"{context}, and max_tokens is {max_tokens}. Request at most {room}, or shorten the prompt"
            raise RefusedError(message, "max_tokens", "context_length_exceeded")
        if body.stop_token_ids not in (None, [], [self.chat.end_of_turn]):
            message = f"turns end only with token {self.chat.end_of_turn}; omit stop_token_ids"
            raise RefusedError(message, "stop_token_ids")
        if body.ignore_eos and not body.stop_token_ids:
            message = f"turns end with token {self.chat.end_of_turn}: add it to stop_token_ids, or omit ignore_eos"
            raise RefusedError(message, "ignore_eos")
        given = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(body, name)) is not None}
        given["max_tokens"] = max_tokens or min(room, self.sampling.max_tokens)
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return replace(self.sampling, **given)

    async def answers(
        self, request: Request, body: GenerationRequest, prompts: list[list[int]], max_tokens: int | None
    ) -> list[list[Turn]]:
        """`n` turns for each prompt. The first prompt's first draw has the seed itself as its key.

        Raises GoneError if the client disconnects. On any error, remaining jobs are cancelled.
        """
        variant = self.variant(body.model)
        if len(prompts) * body.n > MAX_TURNS:
            message = f"{len(prompts)} prompts with n = {body.n} exceed the limit of {MAX_TURNS} answers per request"
            raise RefusedError(message, "n")
        seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
        jobs = []
        for place, token_ids in enumerate(prompts):
            keys = [seed if not place + draw else key64(seed, "answer", place, draw) for draw in range(body.n)]
            jobs.append(GenerationJob(token_ids, keys, self.sampling_of(body, len(token_ids), max_tokens), variant))
        return await self.run(request, jobs)

    async def routed(self, request: Request, body: ChatRequest, messages: Messages, trace: str, length: int) -> Decision:
        """Who answers a chat completion of `length` tokens. Raises RefusedError for what the large model could not answer."""
        max_tokens, specialists = body.max_completion_tokens or body.max_tokens, self.specialists
        if specialists is None or body.model not in specialists.names or for_person(body) or draws(body):
            return Decision()
        self.sampling_of(body, length, max_tokens)
        return await specialists.decide(messages, trace, max_tokens, partial(self.run, request))

    async def run(self, request: Request, jobs: Sequence[GenerationJob], engine: EngineThread | None = None) -> list[list[Turn]]:
        """The turns of each job, on the large model's engine if no other is given; see `answers`."""
        engine = engine or self.turns
        drawing = [asyncio.wrap_future(engine.submit(job)) for job in jobs]
        leaving = asyncio.ensure_future(disconnected(request))
        missing = set(drawing)
        try:
            while missing:
                done, _ = await asyncio.wait({*missing, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if leaving in done:
                    raise GoneError
                if errors := [error for turns in done if (error := turns.exception())]:
                    raise errors[0]
                missing -= done
            return [turns.result() for turns in drawing]
        finally:
            leaving.cancel()
            for job, turns in zip(jobs, drawing, strict=True):
                turns.cancel()
                engine.cancel(job)

    # ---- replies ------------------------------------------------------------------------------------------------------------

    def text(self, turn: Turn, skip_special: bool = True) -> str:
        tokenizer = self.chat.tokenizer
        return tokenizer.decode(list(turn.token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def pieces(self, turn: Turn) -> list[str]:
        """Each token's text."""
        return [self.chat.tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in turn.token_ids]

    def head(self, kind: str, body: GenerationRequest) -> dict[str, Any]:
        name = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{secrets.token_hex(12)}"
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": self.policy_hash,
        }

    def completion_choice(self, body: CompletionRequest, index: int, turn: Turn) -> dict[str, Any]:
        logprobs = None
        if body.logprobs is not None:
            texts = self.pieces(turn)
            starts = [sum(map(len, texts[:place])) for place in range(len(texts))]
            values = list(turn.logprobs)
            logprobs = {"tokens": texts, "token_logprobs": values, "text_offset": starts, "top_logprobs": None}
        text = self.text(turn, body.skip_special_tokens)
        return {"index": index, "text": text, "logprobs": logprobs, **self.ending(body, turn)}

    def chat_choice(self, body: ChatRequest, index: int, turn: Turn) -> dict[str, Any]:
        logprobs = None
        if body.logprobs:
            pairs = zip(self.pieces(turn), turn.logprobs, strict=True)
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
            ]
            logprobs = {"content": content, "refusal": None}
        parsed = self.chat.read(turn.token_ids)
        message = {"role": "assistant", "content": parsed.action, "refusal": None}
        if parsed.thought:
            message["reasoning_content"] = parsed.thought  # vLLM's name for it
        return {"index": index, "message": message, "logprobs": logprobs, **self.ending(body, turn)}

    def specialist_choice(self, body: ChatRequest, decision: Decision, turn: Turn) -> dict[str, Any]:
        message = {"role": "assistant", "content": decision.text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, **self.ending(body, turn)}

    def log_calls(
        self,
        body: ChatRequest,
        messages: Messages,
        trace: str,
        answered: Sequence[tuple[dict[str, Any], Turn]],
        decision: Decision,
        latency_ms: float,
    ) -> None:
        """Log the answers (choices and their turns) of a chat completion, unless they are for a person."""
        if self.log is None:
            return
        human, by, why = for_person(body), decision.by, decision.fallback
        for part, turn in answered:
            text, tokens = part["message"]["content"], len(turn.token_ids)
            self.log.call(trace, messages, text, latency_ms, human=human, provenance=by, fallback=why, tokens=tokens)

    def record_calls(
        self,
        body: ChatRequest,
        messages: Messages,
        trace: str,
        prompt_ids: Sequence[int],
        answered: Sequence[tuple[dict[str, Any], Turn]],
    ) -> None:
        """Record the policy's answers (choices and their turns) to a chat completion, unless they are for a person."""
        if self.recording is None or for_person(body):
            return
        sampling = self.sampling_of(body, len(prompt_ids), body.max_completion_tokens or body.max_tokens)
        texts = [(part["message"]["content"], turn) for part, turn in answered]
        task = str((body.metadata or {}).get("task") or "")
        self.recording.calls(trace, task, sampling, prompt_ids, messages[-1]["content"], texts)

    def check_recorded(self, name: str) -> None:
        """Raise RefusedError for a model whose answers can't be recorded."""
        if self.recording is not None and self.names[name].n > 1:
            message = f"answers are recorded for training here, and {name} chooses them among several draws: use a name without +"
            raise RefusedError(message, "model")

    def ending(self, body: GenerationRequest, turn: Turn) -> dict[str, Any]:
        reason = {"finish_reason": "stop" if turn.stop_reason == "stop" else "length"}
        return {**reason, "token_ids": list(turn.token_ids)} if body.return_token_ids else reason


def trace_of(body: ChatRequest) -> str:
    """The agent's run that a call belongs to; a name of its own if the client gives none."""
    return str((body.metadata or {}).get("trace") or secrets.token_hex(12))


def for_person(body: ChatRequest) -> bool:
    """Whether a person reads the answer."""
    return str((body.metadata or {}).get("human", "")).lower() == "true"


def usage(prompts: Sequence[Sequence[int]], turns: list[list[Turn]]) -> dict[str, int]:
    read, written = sum(map(len, prompts)), sum(len(turn.token_ids) for drawn in turns for turn in drawn)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def streamed(reply: dict[str, Any], body: GenerationRequest) -> Iterator[str]:
    """A finished reply as server-sent events. A turn is one event: the best one is known only after all draws."""
    chat = reply["object"] == "chat.completion"
    head = {key: reply[key] for key in reply if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk" if chat else reply["object"]
    for choice in reply["choices"]:
        last = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
        first = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")} | {"finish_reason": None}
        if chat:
            first["delta"] = {key: value for key, value in choice["message"].items() if key != "refusal"}
            last["delta"] = {}
        else:
            last["text"] = ""
        for part in (first, last):
            yield f"data: {json.dumps({**head, 'choices': [part]})}\n\n"
    if body.stream_options and body.stream_options.include_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': reply['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def send(reply: dict[str, Any], body: GenerationRequest) -> Response:
    return StreamingResponse(streamed(reply, body), media_type="text/event-stream") if body.stream else JSONResponse(reply)


def validation_reply(error: RequestValidationError) -> JSONResponse:
    """The reply to a request that does not match its schema."""
    lines, field = [], None
    for item in error.errors():
        names = [str(part) for part in item["loc"][1:]]
        field = field or (names[0] if names else None)
        prefix = f"{'.'.join(names)}: " if names else ""
        unknown = item["type"] == "extra_forbidden"
        lines.append(prefix + ("unknown field; omit it" if unknown else item["msg"].removeprefix("Value error, ")))
    more = [f"and {len(lines) - MAX_ERRORS} more errors"] if len(lines) > MAX_ERRORS else []
    return error_reply("; ".join(lines[:MAX_ERRORS] + more), 400, field)


def make_app(agent: Agent) -> RequestGuard:
    """The application, which does not close `agent`."""
    app = FastAPI(title="Bellwether", docs_url=None, redoc_url=None)
    add_error_replies(app)
    add_endpoints(app, agent)
    add_outcomes(app, agent.log, agent.recording)
    return RequestGuard(app)


def add_error_replies(app: FastAPI) -> None:
    """Reply to all errors in the format of OpenAI's API."""

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return error_reply(str(error.detail), error.status_code)

    @app.exception_handler(GoneError)
    async def gone(_: Request, error: GoneError) -> Response:
        return error_reply("the client disconnected", 499)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return validation_reply(error)

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return error_reply(str(error), error.status, error.param, error.code)

    @app.exception_handler(EngineError)
    async def unsupported_by_engine(_: Request, error: EngineError) -> Response:
        return error_reply(str(error), 400)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_reply(f"{type(error).__name__}: {error}", 502 if isinstance(error, ConnectionError) else 500)


def add_endpoints(app: FastAPI, agent: Agent) -> None:
    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "bellwether", "max_model_len": agent.max_length}

    @app.get("/health")
    async def health() -> Response:
        alive = agent.turns.alive and (agent.specialists is None or agent.specialists.alive)
        return JSONResponse({"status": "ok"}) if alive else error_reply("the engine has stopped", 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry(name) for name in agent.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        agent.variant(name)
        return entry(name)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        agent.variant(body.model)
        prompts = [agent.chat.tokens_of(prompt) if isinstance(prompt, str) else list(prompt) for prompt in body.prompts]
        size = agent.chat.vocabulary
        if not prompts or not all(prompts) or any(not 0 <= token < size for prompt in prompts for token in prompt):
            raise RefusedError(f"prompt must be non-empty text or token ids from 0 to {size - 1}", "prompt")
        drawn = await agent.answers(request, body, prompts, body.max_tokens)
        turns = [turn for of_prompt in drawn for turn in of_prompt]
        parts = [agent.completion_choice(body, index, turn) for index, turn in enumerate(turns)]
        return send({**agent.head("text_completion", body), "choices": parts, "usage": usage(prompts, drawn)}, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        agent.variant(body.model)
        agent.check_recorded(body.model)
        try:
            messages = plain_messages(body.messages)
        except ValueError as error:
            raise RefusedError(str(error), "messages") from error
        if len(messages) % 2 == 0:
            raise RefusedError("messages ends with an assistant message; it must end with a user message", "messages")
        token_ids, began, trace = agent.chat.encode(messages).token_ids, time.monotonic(), trace_of(body)
        head, decision = agent.head("chat.completion", body), await agent.routed(request, body, messages, trace, len(token_ids))
        if decision.turn is not None:
            prompt, turns = decision.prompt, [decision.turn]
            parts = [agent.specialist_choice(body, decision, decision.turn)]
            head["system_fingerprint"] = decision.policy_hash
        else:
            prompt = tuple(token_ids)
            (turns,) = await agent.answers(request, body, [token_ids], body.max_completion_tokens or body.max_tokens)
            parts = [agent.chat_choice(body, index, turn) for index, turn in enumerate(turns)]
        answered = list(zip(parts, turns, strict=True))
        if decision.turn is None:
            agent.record_calls(body, messages, trace, prompt, answered)
        agent.log_calls(body, messages, trace, answered, decision, 1000 * (time.monotonic() - began))
        return send({**head, "choices": parts, "usage": usage([prompt], [turns])}, body)
