"""ASGI middleware that rejects requests to other host names, from other sites' pages, and with large bodies."""

from __future__ import annotations

import re

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
"""This machine's names, with any port, since a tunnel may use another. With DNS rebinding, a page still sends its own name."""
MAX_BODY = 4 * 2**20
"""Bytes of a request. A prompt of 640 tokens has about 4 KB."""
DRAIN_FACTOR = 4
"""An oversized body is read up to this many times `MAX_BODY`."""
MAX_MESSAGE = 2000
"""Characters of an error message."""


def error_reply(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error in the format of OpenAI's API. Long messages, which may quote the request, are cut."""
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status_code=status)


def foreign_request_error(headers: Headers) -> JSONResponse | None:
    """The error reply to a request sent to another host name or by another site's page, or None."""
    if not HOST.fullmatch(headers.get("host", "")):
        return error_reply("this server accepts only the host names 127.0.0.1 and localhost", 421, code="wrong_host")
    origin = headers.get("origin")
    if origin is not None and not HOST.fullmatch(origin.partition("://")[2]):
        return error_reply("requests from other sites' pages are not allowed", 403, code="wrong_origin")
    return None


class RequestGuard:
    """Passes acceptable requests on to `app`, each as one message of at most `max_body` bytes."""

    def __init__(self, app: ASGIApp, max_body: int = MAX_BODY) -> None:
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "served without websockets and lifespan"
        if error := foreign_request_error(Headers(scope=scope)):
            await error(scope, receive, send)
            return
        body = await self._body(receive)
        if body is None:
            message = f"the request exceeds {self.max_body} bytes; send fewer or shorter prompts"
            await error_reply(message, 413, code="request_too_large")(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, receive_body, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The request's body; None if it is too long or the client disconnected. An oversized body is read for a while and
        discarded: a client that is still sending when the connection closes may not see the reply."""
        body, size = bytearray(), 0
        while True:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            if size <= self.max_body:
                body += part
            if message["type"] == "http.disconnect" or size > DRAIN_FACTOR * self.max_body:
                return None
            if not message.get("more_body"):
                return bytes(body) if size <= self.max_body else None
