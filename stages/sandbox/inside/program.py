"""The fork that runs a program: load it, then answer calls of its function."""

from __future__ import annotations

import os
import re
import socket
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from stages.sandbox.inside.values import decode, describe, encode, receive, send

FAULTS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError)
"""What `compile` raises for text that is no program."""
_INDENT = re.compile(r"^[ \t]+(?=[^\s#])", re.M)
_DEFINITION = re.compile(r"^(async |def |class |@)", re.M)


def compile_program(source: str, entry: str | None, parameters: Sequence[str]) -> types.CodeType:
    """`source` as a module; or, where `entry` is asked for and nothing is defined, as the expression that this function returns,
    or as its body. Where that is no program, it may still be a body whose first line lost its indent, which is then put back.
    Raises one of FAULTS."""
    if not source.strip():
        raise SyntaxError("there is no program")
    if entry is None:
        return compile(source, "<program>", "exec")
    head = f"def {entry}({', '.join(parameters)}):\n"
    try:
        return as_written(source, entry, head)
    except SyntaxError:
        for body in indented_again(source):
            with suppress(*FAULTS):
                return compile(head + body, "<program>", "exec")
        raise


def as_written(source: str, entry: str, head: str) -> types.CodeType:
    if re.search(rf"^{re.escape(entry)}\s*=[^=]", source, re.M) or _DEFINITION.search(source):
        return compile(source, "<program>", "exec")
    body = textwrap.dedent(source)
    try:
        compile(f"({body}\n)", "<program>", "eval")
    except SyntaxError:
        return compile(head + textwrap.indent(body, "    "), "<program>", "exec")
    return compile(f"{head}    return ({body}\n    )", "<program>", "exec")


def indented_again(source: str) -> Iterator[str]:
    """`source` with its first line indented like later ones, the smallest indent first: an answer loses its outer white space,
    and so a body the indent of its first line alone. Lines in brackets or texts may be indented less than the body is."""
    first, newline, later = source.strip().partition("\n")
    for indent in sorted(set(_INDENT.findall(later)), key=len):
        yield f"{indent}{first}{newline}{later}\n"


class Steps:
    """Counts instructions (bytecode, of the program's own functions): a loop without end is one on every machine alike."""

    def __init__(self, most: int | None, exhausted: Callable[[], None]) -> None:
        self.most, self.left, self.exhausted = most, most or 0, exhausted

    def begin(self) -> None:
        self.left = self.most or 0
        if self.most is not None:
            sys.settrace(self.trace)

    def trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != "<program>":
            return None
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif event == "opcode":
            self.left -= 1
            if self.left < 0:
                self.exhausted()
        return self.trace


def run_program(job: socket.socket, peer: socket.socket) -> None:
    """Load the program that `job` brings, say how that went, then answer calls from `peer`."""
    order = receive(job)
    entry = order["entry"]
    told = [job]

    def leave(status: str, message: str) -> None:
        flush()
        send(told[0], {"status": status, "message": message})
        os._exit(0)

    steps = Steps(order["steps"], lambda: leave("timeout", f"more than {order['steps']} steps"))
    module = types.ModuleType("__main__" if entry is None else "program")
    sys.modules[module.__name__] = module
    try:
        code = compile_program(order["source"], entry, order["parameters"])
    except FAULTS as error:
        return leave("compile_error", describe(error))
    try:
        exec(compile(order["context"], "<context>", "exec"), module.__dict__)
        steps.begin()
        exec(code, module.__dict__)
        function = getattr(module, entry) if entry else None
    except AttributeError as error:
        sys.settrace(None)
        missing = entry is not None and entry not in module.__dict__
        return leave("error", f"NameError: {entry} is not defined" if missing else describe(error))
    except BaseException as error:
        sys.settrace(None)
        return leave("error", describe(error))
    sys.settrace(None)
    if function is None:
        return leave("ok", "")
    flush()
    send(job, {"status": "ready", "message": ""})
    told[0] = peer
    while True:
        try:
            call = receive(peer)
        except EOFError:
            return
        reply = answer(function, call, steps)
        flush()
        send(peer, reply)


def answer(function: Callable[..., Any], call: Any, steps: Steps) -> dict[str, Any]:
    """What a call returns, and its arguments afterwards; or what it raised."""
    arguments, named = decode(call["arguments"]), decode(call["named"])
    try:
        steps.begin()
        value = encode(function(*arguments, **named))
    except BaseException as error:
        sys.settrace(None)
        return {"status": "raised", "kind": type(error).__name__, "message": describe(error)}
    sys.settrace(None)
    try:
        after = encode(arguments)
    except (TypeError, RecursionError):
        after = call["arguments"]
    return {"status": "value", "value": value, "after": after}


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
