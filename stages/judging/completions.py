"""One request to an OpenAI-compatible server (`POST /chat/completions`): what came back, whatever the server sends."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from stages.records.messages import well_formed
from stages.runtime.validation import shortened

LARGEST = 4 << 20
"""Bytes of a reply, at most."""
MOST_TOKENS = 2**53
WRONG_SETUP = {
    401: "it rejects the key in the environment variable OPENAI_API_KEY",
    402: "the account has no credit left",
    403: "it denies access",
    404: "it has no such address or model; check base_url and model",
}
"""HTTP statuses with which no further request could pass."""


@dataclass(frozen=True)
class Reply:
    """`status`: HTTP status; `wait`: seconds that the server asks to wait, or None; `place`: where it redirects to."""

    status: int
    text: str
    wait: float | None = None
    place: str = ""

    @property
    def error(self) -> dict[str, Any]:
        """The error that the body names; {} without one."""
        try:
            found = _object(self.text).get("error")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def refused(self) -> bool:
        """Whether a filter of contents rejected the request."""
        metadata = self.error.get("metadata")
        flagged = isinstance(metadata, dict) and "flagged_input" in metadata
        return 400 <= self.status < 500 and (flagged or self.error.get("code") == "content_filter")

    @property
    def hopeless(self) -> str | None:
        """Why no further request to this server could pass; None if one could."""
        if 300 <= self.status < 400:
            return f"it redirects to {self.place or 'another address'}; set base_url to that"
        if self.error.get("code") == "insufficient_quota":
            return WRONG_SETUP[402]
        return None if self.refused else WRONG_SETUP.get(self.status)


@dataclass(frozen=True)
class Completion:
    """What a model wrote. `refusal`: why it did not, as far as the server says; "" if it did."""

    text: str
    refusal: str
    cut: bool
    """Whether it ended at max_tokens."""
    tokens_in: int
    tokens_out: int


class ServerError(ValueError):
    """A reply of status 200 that is an error all the same; `code`: as an HTTP status, 0 if it has none."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def post(client: httpx.Client, body: Mapping[str, Any], timeout_s: float) -> Reply:
    """Send a request. Raises httpx.HTTPError, of it httpx.TimeoutException if the whole reply takes longer than `timeout_s` after
    its first byte, and httpx.RemoteProtocolError if it is larger than LARGEST."""
    with client.stream("POST", "chat/completions", json=body) as response:
        ends, found = time.monotonic() + timeout_s, bytearray()
        for part in response.iter_bytes():
            found += part
            if len(found) > LARGEST:
                raise httpx.RemoteProtocolError(f"a reply of more than {LARGEST >> 20} MB")
            if time.monotonic() > ends:
                raise httpx.ReadTimeout(f"the reply was not complete after {timeout_s:g} s")
        text = found.decode("utf-8", "replace")
        return Reply(response.status_code, text, _retry_after(response), response.headers.get("location", ""))


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds in the header Retry-After; None without one, or for a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        return None


def read(text: str) -> Completion:
    """The completion in a body of status 200. Raises ServerError for an error, and ValueError for anything else."""
    body = _object(text)
    error = body.get("error")
    if error and not body.get("choices"):
        code = error.get("code") if isinstance(error, dict) else 0
        raise ServerError(code if isinstance(code, int) else 0, f"an error in a reply of status 200: {shortened(error)}")
    try:
        choice, usage = body["choices"][0], body.get("usage") or {}
        message = choice["message"]
        refusal = message.get("refusal") or ("content filter" if choice.get("finish_reason") == "content_filter" else "")
        tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        return Completion(
            well_formed(_written(message.get("content"))),
            well_formed(str(refusal)),
            choice.get("finish_reason") == "length",
            *tokens,
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as problem:
        raise ValueError(f"no chat completion ({problem!r})") from problem


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise ValueError(f"no JSON object, but a {type(found).__name__}")
    return found


def _written(content: Any) -> str:
    """The text of a message's content, which some servers send in parts. Raises TypeError for anything else."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError(f"content is a {type(content).__name__}")
    return content or ""


def _count(tokens: Any) -> int:
    """A number of tokens; 0 for what is none."""
    return tokens if type(tokens) is int and 0 <= tokens <= MOST_TOKENS else 0
