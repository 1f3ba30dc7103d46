"""The fork that runs the tests of a program, whose function is a stand-in that asks the other fork."""

from __future__ import annotations

import builtins
import socket
import types
from collections.abc import Sequence
from typing import Any

from stages.sandbox.guest.program import FAULTS
from stages.sandbox.guest.protocol import clip, decode, describe, encode, receive, send, shown


class UnfitError(Exception):
    """The tests can't be run, or hand the program something that is no plain value."""


class RaisedError(Exception):
    """The program raised something, took too many steps, or is gone; `status` says which."""

    status = "error"


class Proxy:
    """Stands in the tests for the program's function."""

    def __init__(self, peer: socket.socket, name: str) -> None:
        self.peer, self.name, self.gone = peer, name, ("", "")
        self.call, self.value = "", ""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        words = [*map(shown, arguments), *(f"{key}={shown(item)}" for key, item in named.items())]
        self.call, self.value = clip(f"{self.name}({', '.join(words)})"), ""
        said = self.ask(arguments, named)
        if said["status"] != "value":
            error = RaisedError(said["message"])
            error.status = said["status"] if said["status"] in ("timeout", "gone") else "error"
            builtin = getattr(builtins, str(said.get("kind")), None)
            if isinstance(builtin, type) and issubclass(builtin, Exception) and error.status == "error":
                # Tests may expect an exception of a certain type.
                raise type("RaisedError", (RaisedError, builtin), {})(said["message"])
            raise error
        try:
            value = decode(said["value"])
            renew(arguments, decode(said["after"]))
        except Exception as error:
            raise RaisedError("the answer is no value") from error
        self.value = shown(value)
        return value

    def ask(self, arguments: tuple, named: dict) -> Any:
        if self.gone[0]:
            return {"status": self.gone[0], "message": self.gone[1]}
        try:
            message = {"arguments": encode(list(arguments)), "named": encode(named)}
        except (TypeError, RecursionError) as error:
            raise UnfitError(f"{self.name} is called with what can't be handed to it: {error}") from error
        try:
            send(self.peer, message)
            said = receive(self.peer)
            if not isinstance(said, dict) or said.get("status") not in ("value", "raised", "timeout"):
                raise ValueError
            if said["status"] != "value":
                said["message"] = clip(str(said["message"]))
        except (EOFError, OSError, ValueError, KeyError, RecursionError):
            said = {"status": "gone", "message": ""}
        if said["status"] in ("timeout", "gone"):
            self.gone = said["status"], said["message"]
        return said


def renew(arguments: Sequence[Any], after: Sequence[Any]) -> None:
    """Let the tests see what the program did to its arguments."""
    for mine, theirs in zip(arguments, after, strict=True):
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = theirs
        elif isinstance(mine, dict | set) and type(mine) is type(theirs):
            mine.clear()
            mine.update(theirs)


def run_tests(job: socket.socket, peer: socket.socket) -> None:
    """Run each test that `job` brings (statements with asserts) and report it before the next one begins."""
    order = receive(job)
    proxy = Proxy(peer, order["entry"])
    scope: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(order["context"], "<context>", "exec"), scope)
        unfit = ""
    except BaseException as error:
        unfit = describe(error)
    scope.update(dict.fromkeys((order["entry"], "candidate"), proxy))
    for test in order["tests"]:
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
    """Raises UnfitError where the test, or what comes before it (`unfit`), is no program."""
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
