"""The agent behind OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models and /health, as a FastAPI application."""

from __future__ import annotations

import asyncio
import difflib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from stages.agent.chat import Chat
from stages.engine.engine import EngineError, Sampling, Turn
from stages.records.messages import plain_messages
from stages.seeding import key64
from stages.serving.engine_thread import EngineThread, GenerationJob
from stages.serving.request_guard import RequestGuard, error_reply
from stages.serving.schemas import MAX_TURNS, ChatRequest, CompletionRequest, GenerationRequest
from stages.serving.variants import Variant

SEED_BITS = 31
MAX_FAULTS = 5
"""Of a request's form that are named."""


class RefusedError(ValueError):
    """A request can't be answered: HTTP status, what is wrong and what to do, which field, OpenAI's short name for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class GoneError(Exception):
    """The client has closed the connection: nobody waits for the reply."""


async def left(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Agent:
    """What is served. `names`: how the model chooses under each name; `sampling`: what requests leave out; `max_length`: tokens
    of prompt and answer together."""

    turns: EngineThread
    chat: Chat
    names: Mapping[str, Variant]
    policy_hash: str
    sampling: Sampling
    max_length: int

    def choice(self, name: str) -> Variant:
        if name not in self.names:
            near = difflib.get_close_matches(name, list(self.names), n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            message = f"the model '{name}' is not served here{hint} There are {', '.join(self.names)}"
            raise RefusedError(message, "model", "model_not_found", 404)
        return self.names[name]

    def sampling_of(self, asked: GenerationRequest, length: int, max_tokens: int | None) -> Sampling:
        """How a prompt of `length` tokens is gone on from. Raises RefusedError where there is no room."""
        room = self.max_length - length
        said = f"this model's context is {self.max_length} tokens (model.max_length in params.yaml); the prompt has {length}"
        if room < 1:
            message = f"{said}, which leaves no room for an answer. Shorten it, or serve with a larger model.max_length"
            raise RefusedError(message, "messages" if isinstance(asked, ChatRequest) else "prompt", "context_length_exceeded")
        if max_tokens is not None and max_tokens > room:
            message = f"{said}, and {max_tokens} more were asked for. Ask for at most {room}, or shorten the prompt"
            raise RefusedError(message, "max_tokens", "context_length_exceeded")
        if asked.stop_token_ids not in (None, [], [self.chat.end_of_turn]):
            raise RefusedError(f"turns end with token {self.chat.end_of_turn} alone; leave stop_token_ids out", "stop_token_ids")
        if asked.ignore_eos and not asked.stop_token_ids:
            message = f"turns end with token {self.chat.end_of_turn}: name it in stop_token_ids too, or leave ignore_eos out"
            raise RefusedError(message, "ignore_eos")
        given = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k")}
        settings: dict[str, Any] = {
            name: getattr(self.sampling, name) if value is None else value for name, value in given.items()
        }
        settings["top_k"] = max(0, settings["top_k"])
        return Sampling(**settings, max_tokens=max_tokens or min(room, self.sampling.max_tokens))

    async def answers(
        self, request: Request, asked: GenerationRequest, prompts: list[list[int]], max_tokens: int | None
    ) -> list[list[Turn]]:
        """`n` turns for each prompt. The first one's first draw has the seed itself as its key.

        Raises GoneError if the client leaves. What is not needed then, or because another prompt failed, is not computed on.
        """
        choice = self.choice(asked.model)
        if len(prompts) * asked.n > MAX_TURNS:
            message = (
                f"{len(prompts)} prompts with {asked.n} answers each are more than the {MAX_TURNS} that one request may have"
            )
            raise RefusedError(message, "n")
        seed = secrets.randbits(SEED_BITS) if asked.seed is None else asked.seed
        orders = []
        for place, token_ids in enumerate(prompts):
            keys = [seed if not place + draw else key64(seed, "answer", place, draw) for draw in range(asked.n)]
            orders.append(GenerationJob(token_ids, keys, self.sampling_of(asked, len(token_ids), max_tokens), choice))
        return await self.drawn(request, orders)

    async def drawn(self, request: Request, orders: Sequence[GenerationJob]) -> list[list[Turn]]:
        """See `answers`."""
        drawing = [asyncio.wrap_future(self.turns.submit(order)) for order in orders]
        leaving = asyncio.ensure_future(left(request))
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
            for order, turns in zip(orders, drawing, strict=True):
                turns.cancel()
                self.turns.cancel(order)

    # ---- replies ------------------------------------------------------------------------------------------------------------

    def text(self, turn: Turn, skip_special: bool = True) -> str:
        tokenizer = self.chat.tokenizer
        return tokenizer.decode(list(turn.token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def pieces(self, turn: Turn) -> list[str]:
        """Each token's text."""
        return [self.chat.tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in turn.token_ids]

    def head(self, kind: str, asked: GenerationRequest) -> dict[str, Any]:
        name = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{secrets.token_hex(12)}"
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": self.policy_hash,
        }

    def completion_choice(self, asked: CompletionRequest, index: int, turn: Turn) -> dict[str, Any]:
        logprobs = None
        if asked.logprobs is not None:
            texts = self.pieces(turn)
            starts = [sum(map(len, texts[:place])) for place in range(len(texts))]
            values = list(turn.logprobs)
            logprobs = {"tokens": texts, "token_logprobs": values, "text_offset": starts, "top_logprobs": None}
        text = self.text(turn, asked.skip_special_tokens)
        return {"index": index, "text": text, "logprobs": logprobs, **self.ending(asked, turn)}

    def chat_choice(self, asked: ChatRequest, index: int, turn: Turn) -> dict[str, Any]:
        logprobs = None
        if asked.logprobs:
            pairs = zip(self.pieces(turn), turn.logprobs, strict=True)
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
            ]
            logprobs = {"content": content, "refusal": None}
        said = self.chat.read(turn.token_ids)
        message = {"role": "assistant", "content": said.action, "refusal": None}
        if said.thought:  # under the name that vLLM's server and others give it
            message["reasoning_content"] = said.thought
        return {"index": index, "message": message, "logprobs": logprobs, **self.ending(asked, turn)}

    def ending(self, asked: GenerationRequest, turn: Turn) -> dict[str, Any]:
        reason = {"finish_reason": "stop" if turn.stop_reason == "stop" else "length"}
        return {**reason, "token_ids": list(turn.token_ids)} if asked.return_token_ids else reason


def usage(prompts: list[list[int]], turns: list[list[Turn]]) -> dict[str, int]:
    read, written = sum(map(len, prompts)), sum(len(turn.token_ids) for drawn in turns for turn in drawn)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def streamed(reply: dict[str, Any], asked: GenerationRequest) -> Iterator[str]:
    """A finished reply as server-sent events. A turn is sent as a whole: which one it is, is known when all draws are done."""
    chat = reply["object"] == "chat.completion"
    head = {**{key: reply[key] for key in reply if key not in ("choices", "usage")}}
    head["object"] = "chat.completion.chunk" if chat else reply["object"]
    for choice in reply["choices"]:
        last = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
        said = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")} | {"finish_reason": None}
        if chat:
            said["delta"] = {key: value for key, value in choice["message"].items() if key != "refusal"}
            last["delta"] = {}
        else:
            last["text"] = ""
        for part in (said, last):
            yield f"data: {json.dumps({**head, 'choices': [part]})}\n\n"
    if asked.stream_options and asked.stream_options.include_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': reply['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def send(reply: dict[str, Any], asked: GenerationRequest) -> Response:
    return StreamingResponse(streamed(reply, asked), media_type="text/event-stream") if asked.stream else JSONResponse(reply)


def said_wrong(error: RequestValidationError) -> JSONResponse:
    """A request of the wrong form, in words."""
    lines, place = [], None
    for item in error.errors():
        names = [str(part) for part in item["loc"][1:]]
        place = place or (names[0] if names else None)
        what = f"{'.'.join(names)}: " if names else ""
        unknown = item["type"] == "extra_forbidden"
        lines.append(what + ("unknown field; leave it out" if unknown else item["msg"].removeprefix("Value error, ")))
    more = [f"and {len(lines) - MAX_FAULTS} more faults"] if len(lines) > MAX_FAULTS else []
    return error_reply("; ".join(lines[:MAX_FAULTS] + more), 400, place)


def make_app(agent: Agent) -> RequestGuard:
    """The application; `agent` is not closed with it."""
    app = FastAPI(title="Bellwether", docs_url=None, redoc_url=None)
    add_error_replies(app)
    add_endpoints(app, agent)
    return RequestGuard(app)


def add_error_replies(app: FastAPI) -> None:
    """All errors in the form of OpenAI's API."""

    @app.exception_handler(HTTPException)
    async def not_here(_: Request, error: HTTPException) -> Response:
        return error_reply(str(error.detail), error.status_code)

    @app.exception_handler(GoneError)
    async def unheard(_: Request, error: GoneError) -> Response:
        return error_reply("the client has left", 499)

    @app.exception_handler(RequestValidationError)
    async def wrong_form(_: Request, error: RequestValidationError) -> Response:
        return said_wrong(error)

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return error_reply(str(error), error.status, error.param, error.code)

    @app.exception_handler(EngineError)
    async def beyond_the_engine(_: Request, error: EngineError) -> Response:
        return error_reply(str(error), 400)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_reply(f"{type(error).__name__}: {error}", 502 if isinstance(error, ConnectionError) else 500)


def add_endpoints(app: FastAPI, agent: Agent) -> None:
    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "bellwether", "max_model_len": agent.max_length}

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if agent.turns.alive else error_reply("the engine has ended", 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry(name) for name in agent.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        agent.choice(name)
        return entry(name)

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        agent.choice(asked.model)
        prompts = [agent.chat.tokens_of(prompt) if isinstance(prompt, str) else list(prompt) for prompt in asked.prompts]
        size = agent.chat.vocabulary
        if not prompts or not all(prompts) or any(not 0 <= token < size for prompt in prompts for token in prompt):
            raise RefusedError(f"prompt must be text or token ids from 0 to {size - 1}, one at least", "prompt")
        drawn = await agent.answers(request, asked, prompts, asked.max_tokens)
        turns = [turn for of_prompt in drawn for turn in of_prompt]
        parts = [agent.completion_choice(asked, index, turn) for index, turn in enumerate(turns)]
        return send({**agent.head("text_completion", asked), "choices": parts, "usage": usage(prompts, drawn)}, asked)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatRequest) -> Response:
        agent.choice(asked.model)
        try:
            messages = plain_messages(asked.messages)
        except ValueError as error:
            raise RefusedError(str(error), "messages") from error
        if len(messages) % 2 == 0:
            raise RefusedError("messages ends with the assistant's turn; it must end with what the assistant answers", "messages")
        prompts = [agent.chat.encode(messages).token_ids]
        drawn = await agent.answers(request, asked, prompts, asked.max_completion_tokens or asked.max_tokens)
        parts = [agent.chat_choice(asked, index, turn) for index, turn in enumerate(drawn[0])]
        return send({**agent.head("chat.completion", asked), "choices": parts, "usage": usage(prompts, drawn)}, asked)

    return app
