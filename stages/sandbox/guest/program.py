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
from typing import Any, NoReturn

from stages.sandbox.guest.protocol import decode, describe, encode, receive, send
from stages.sandbox.guest.step_counter import PROGRAM, Steps, counter

FAULTS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError)
"""What `compile` raises for text that is not a valid program."""
_INDENT = re.compile(r"^[ \t]+(?=[^\s#])", re.M)
_DEFINITION = re.compile(r"^(async |def |class |@)", re.M)


def compile_program(source: str, entry: str | None, parameters: Sequence[str]) -> types.CodeType:
    """`source` as a module; or, if `entry` is given and `source` defines nothing, as the expression that this function returns or
    as its body. If none of these compiles, it is tried as a body whose first line lost its indent. Raises one of FAULTS."""
    if not source.strip():
        raise SyntaxError("there is no program")
    if entry is None:
        return compile(source, PROGRAM, "exec")
    head = f"def {entry}({', '.join(parameters)}):\n"
    try:
        return as_written(source, entry, head)
    except SyntaxError:
        for body in reindented(source):
            with suppress(*FAULTS):
                return compile(head + body, PROGRAM, "exec")
        raise


def as_written(source: str, entry: str, head: str) -> types.CodeType:
    if re.search(rf"^{re.escape(entry)}\s*=[^=]", source, re.M) or _DEFINITION.search(source):
        return compile(source, PROGRAM, "exec")
    body = textwrap.dedent(source)
    try:
        compile(f"({body}\n)", PROGRAM, "eval")
    except SyntaxError:
        return compile(head + textwrap.indent(body, "    "), PROGRAM, "exec")
    return compile(f"{head}    return ({body}\n    )", PROGRAM, "exec")


def reindented(source: str) -> Iterator[str]:
    """`source` with its first line indented like each later line in turn, smallest indent first. Stripping a model's answer
    removes the indent of a body's first line only; lines within brackets or strings may be indented less than the body."""
    first, newline, later = source.strip().partition("\n")
    for indent in sorted(set(_INDENT.findall(later)), key=len):
        yield f"{indent}{first}{newline}{later}\n"


def run_program(job: socket.socket, peer: socket.socket) -> None:
    """Load the program from `job`, report the result, then answer calls from `peer`."""
    request = receive(job)
    entry = request["entry"]
    report_to = [job]

    def leave(status: str, message: str) -> NoReturn:
        flush()
        send(report_to[0], {"status": status, "message": message})
        os._exit(0)

    steps = counter(request["steps"], lambda: leave("timeout", f"more than {request['steps']} steps"))
    for name in [name for name in sys.modules if name.startswith("stages.")]:
        del sys.modules[name]  # so that the program can't change the step counter
    module = types.ModuleType("__main__" if entry is None else "program")
    sys.modules[module.__name__] = module
    try:
        code = compile_program(request["source"], entry, request["parameters"])
    except FAULTS as error:
        return leave("compile_error", describe(error))
    try:
        exec(compile(request["context"], "<context>", "exec"), module.__dict__)
        steps.begin()
        exec(code, module.__dict__)
        function = getattr(module, entry) if entry else None
    except AttributeError as error:
        steps.end()
        missing = entry is not None and entry not in module.__dict__
        return leave("error", f"NameError: {entry} is not defined" if missing else describe(error))
    except BaseException as error:
        steps.end()
        return leave("error", describe(error))
    steps.end()
    if function is None:
        return leave("ok", "")
    flush()
    send(job, {"status": "ready", "message": ""})
    report_to[0] = peer
    while True:
        try:
            call = receive(peer)
        except EOFError:
            return
        reply = answer(function, call, steps)
        flush()
        try:
            send(peer, reply)
        except ValueError as error:  # its value is more than a message takes
            send(peer, {"status": "raised", "kind": type(error).__name__, "message": describe(error)})


def answer(function: Callable[..., Any], call: Any, steps: Steps) -> dict[str, Any]:
    """A call's return value and its arguments afterwards, or the exception it raised."""
    arguments, named = decode(call["arguments"]), decode(call["named"])
    try:
        steps.begin()
        value = encode(function(*arguments, **named))
    except BaseException as error:
        steps.end()
        return {"status": "raised", "kind": type(error).__name__, "message": describe(error)}
    steps.end()
    try:
        after = encode(arguments)
    except (TypeError, RecursionError):
        after = call["arguments"]
    return {"status": "value", "value": value, "after": after}


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
