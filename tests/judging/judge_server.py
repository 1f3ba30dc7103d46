"""A judge whose server is a function, and what the function may answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from stages.judging.contract import Candidate, Question, Rubric
from stages.judging.server import ServerJudge
from stages.judging.settings import ServerParams

RUBRIC = Rubric(answer=("clarity", "depth"))
Handler = Callable[[httpx.Request], httpx.Response]


def question(number: int = 0, kind: str = "pairwise") -> Question:
    shown = tuple(
        Candidate(f"text {number}{side}", name=f"{number}{side}") for side in ("a", "b")[: 2 if kind == "pairwise" else 1]
    )
    rubric = Rubric(items=("short", "polite")) if kind == "checklist" else RUBRIC
    return Question(kind, "task", "write a text", shown, rubric)  # type: ignore[arg-type]


def completion(content: str, **message: Any) -> httpx.Response:
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return httpx.Response(200, json={"choices": [choice], "usage": usage})


def verdict(request: httpx.Request) -> httpx.Response:
    """Longer clarity for the first, always the same reason."""
    return completion(VERDICT)


VERDICT = '{"reason": "because", "first": {"clarity": 8, "depth": 7}, "second": {"clarity": 4, "depth": 4}}'


def judge(root: Path, handler: Handler, waits: list[float] | None = None, **params: Any) -> ServerJudge:
    settings = ServerParams(model="m", requests=params.pop("requests", 1), **params)
    sleep = [].append if waits is None else waits.append
    return ServerJudge(settings, root, httpx.MockTransport(handler), sleep)


def no_server(request: httpx.Request) -> httpx.Response:
    raise AssertionError("the server was asked")
