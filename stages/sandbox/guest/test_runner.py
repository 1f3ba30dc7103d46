"""The fork that runs a program's tests. The program's function is a proxy that calls the other fork."""

from __future__ import annotations

import builtins
import socket
import types
from collections.abc import Sequence
from typing import Any

from stages.sandbox.guest.program import FAULTS
from stages.sandbox.guest.protocol import clip, decode, describe, encode, receive, send, shown


class UnfitError(Exception):
    """The tests can't run, or pass the program an argument that is not a plain value."""


class RaisedError(Exception):
    """The program raised an exception, took too many steps or has exited; `status` says which."""

    status = "error"


class Proxy:
    """The program's function, as the tests see it."""

    def __init__(self, peer: socket.socket, name: str) -> None:
        self.peer, self.name, self.gone = peer, name, ("", "")
        self.call, self.value = "", ""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        words = [*map(shown, arguments), *(f"{key}={shown(item)}" for key, item in named.items())]
        self.call, self.value = clip(f"{self.name}({', '.join(words)})"), ""
        reply = self.request(arguments, named)
        if reply["status"] != "value":
            error = RaisedError(reply["message"])
            error.status = reply["status"] if reply["status"] in ("timeout", "gone") else "error"
            builtin = getattr(builtins, str(reply.get("kind")), None)
            if isinstance(builtin, type) and issubclass(builtin, Exception) and error.status == "error":
                # Tests may expect an exception of a certain type.
                raise type("RaisedError", (RaisedError, builtin), {})(reply["message"])
            raise error
        try:
            value = decode(reply["value"])
            renew(arguments, decode(reply["after"]))
        except Exception as error:
            raise RaisedError("the answer is no value") from error
        self.value = shown(value)
        return value

    def request(self, arguments: tuple, named: dict) -> Any:
        if self.gone[0]:
            return {"status": self.gone[0], "message": self.gone[1]}
        try:
            message = {"arguments": encode(list(arguments)), "named": encode(named)}
        except (TypeError, RecursionError) as error:
            raise UnfitError(f"{self.name} is called with what can't be handed to it: {error}") from error
        try:
            send(self.peer, message)
            reply = receive(self.peer)
            if not isinstance(reply, dict) or reply.get("status") not in ("value", "raised", "timeout"):
                raise ValueError
            if reply["status"] != "value":
                reply["message"] = clip(str(reply["message"]))
        except (EOFError, OSError, ValueError, KeyError, RecursionError):
            reply = {"status": "gone", "message": ""}
        if reply["status"] in ("timeout", "gone"):
            self.gone = reply["status"], reply["message"]
        return reply


def renew(arguments: Sequence[Any], after: Sequence[Any]) -> None:
    """Apply the program's changes to its arguments in place, so that the tests see them."""
    for ours, theirs in zip(arguments, after, strict=True):
        if isinstance(ours, list) and isinstance(theirs, list):
            ours[:] = theirs
        elif isinstance(ours, dict | set) and type(ours) is type(theirs):
            ours.clear()
            ours.update(theirs)


def run_tests(job: socket.socket, peer: socket.socket) -> None:
    """Run each test from `job` (statements with asserts) and report its result before the next one begins."""
    request = receive(job)
    proxy = Proxy(peer, request["entry"])
    scope: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(request["context"], "<context>", "exec"), scope)
        unfit = ""
    except BaseException as error:
        unfit = describe(error)
    scope.update(dict.fromkeys((request["entry"], "candidate"), proxy))
    for test in request["tests"]:
        proxy.call = proxy.value = ""
        verdict, message = "pass", ""
        try:
            exec(tested_code(test, unfit), scope)
        except RaisedError as error:
            verdict, message = error.status, clip(str(error))
        except UnfitError as error:
            verdict, message = "broken", clip(str(error))
        except BaseException as error:
            verdict, message = "fail", f"{failed_line(error, test)}: {describe(error)}"
        send(job, {"verdict": verdict, "message": message, "call": proxy.call, "value": proxy.value})


def tested_code(test: str, unfit: str) -> types.CodeType:
    """The compiled test. Raises UnfitError if it does not compile or its context failed (`unfit`)."""
    try:
        if not unfit:
            return compile(test, "<test>", "exec")
    except FAULTS as error:
        unfit = describe(error)
    raise UnfitError(unfit)


def failed_line(error: BaseException, test: str) -> str:
    """The line of `test` that raised `error`."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<test>":
            line = trace.tb_lineno
        trace = trace.tb_next
    lines = test.splitlines()
    return clip(lines[line - 1]) if 0 < line <= len(lines) else clip(test)
