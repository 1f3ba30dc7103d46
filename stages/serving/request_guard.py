"""What comes in before the application sees it: requests by other names than this machine's, from pages of other sites, and too
large ones are refused."""

from __future__ import annotations

import re

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
"""How this machine calls itself, on any port, since a tunnel may have another. A page whose own name was pointed at 127.0.0.1
(DNS rebinding) still sends that name."""
MAX_BODY = 4 * 2**20
"""Bytes of a request. A prompt of 640 tokens has about 4 KB."""
READ_ON = 4
"""Times `MAX_BODY` after which a request that is too long is not read on."""
MAX_MESSAGE = 2000
"""Characters of an error's message."""


def error_reply(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error in the form of OpenAI's API. A message that quotes the request at length is cut."""
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status_code=status)


def stranger(headers: Headers) -> JSONResponse | None:
    """The refusal of a request that was sent to another name, or by a page of another site."""
    if not HOST.fullmatch(headers.get("host", "")):
        return error_reply(
            "this server answers to 127.0.0.1 and localhost alone; ask for it by one of these", 421, code="wrong_host"
        )
    origin = headers.get("origin")
    if origin is not None and not HOST.fullmatch(origin.partition("://")[2]):
        return error_reply("pages of other sites may not ask this server", 403, code="wrong_origin")
    return None


class RequestGuard:
    """An ASGI application in front of `app`, which is given each request whole, of at most `max_body` bytes."""

    def __init__(self, app: ASGIApp, max_body: int = MAX_BODY) -> None:
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "served without websockets and lifespan"
        if refused := stranger(Headers(scope=scope)):
            await refused(scope, receive, send)
            return
        body = await self._body(receive)
        if body is None:
            message = f"a request may have {self.max_body} bytes; send fewer prompts at a time, or shorter ones"
            await error_reply(message, 413, code="request_too_large")(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, again, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The request's body; None if it is too long or the client has left. What is too long is not kept, but read on for a
        while: a client that is still sending when the connection closes may not see the reply."""
        body, size = bytearray(), 0
        while True:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            if size <= self.max_body:
                body += part
            if message["type"] == "http.disconnect" or size > READ_ON * self.max_body:
                return None
            if not message.get("more_body"):
                return bytes(body) if size <= self.max_body else None
