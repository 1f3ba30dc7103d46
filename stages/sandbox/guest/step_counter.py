"""Counts the instructions of a program: a loop without end is one on every machine alike.

An instruction is one of Python's bytecode, of code that was compiled as PROGRAM. From Python 3.12 on the interpreter reports each
(`sys.monitoring`), in all threads; before, a trace function is told of them, in the thread that makes the call. Counts are the
same in every run of one version of Python, and differ between versions, whose compilers write other bytecode.

What would switch the count off is refused to the program. One that looks for the counter in its own process (frames, gc, ctypes),
or that has code compiled under another name (exec), runs on uncounted until the kernel's limit on processor time ends it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

PROGRAM = "<program>"
"""File name of the code that is counted."""
TOOL = 4
"""Of the six that `sys.monitoring` knows one that no debugger, profiler or measure of coverage goes by."""


class Steps(NamedTuple):
    """`begin`: count from nought what the program does; `end`: until then. Closures over the count: no attribute holds it."""

    begin: Callable[[], None]
    end: Callable[[], None]


def refused(*_: object, **__: object) -> NoReturn:
    raise PermissionError("the sandbox counts this program's instructions: it can't trace or monitor itself")


def counter(most: int | None, exhausted: Callable[[], NoReturn]) -> Steps:
    """Calls `exhausted`, which does not return, at the first instruction after a `begin` that is beyond `most`. None: nothing is
    counted, and nothing refused."""
    if most is None:
        return Steps(lambda: None, lambda: None)
    made = monitored(most, exhausted) if sys.version_info >= (3, 12) else traced(most, exhausted)
    sys.settrace = refused  # type: ignore[assignment]
    return made


def monitored(most: int, exhausted: Callable[[], NoReturn]) -> Steps:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    watch, disable, events = monitoring.set_local_events, monitoring.DISABLE, monitoring.events
    left, counting, instructions = 0, False, events.INSTRUCTION

    def started(code: types.CodeType, _: int) -> Any:
        if code.co_filename == PROGRAM:
            watch(TOOL, code, instructions)
        return disable  # a function that began once has been seen to

    def instruction(_: types.CodeType, __: int) -> None:
        nonlocal left
        if counting:
            left -= 1
            if left < 0:
                exhausted()

    def begin() -> None:
        nonlocal left, counting
        left, counting = most, True

    def end() -> None:
        nonlocal counting
        counting = False

    monitoring.use_tool_id(TOOL, "steps")
    monitoring.register_callback(TOOL, instructions, instruction)
    monitoring.register_callback(TOOL, events.PY_START, started)
    monitoring.set_events(TOOL, events.PY_START)
    for name, value in list(vars(monitoring).items()):
        if isinstance(value, types.BuiltinFunctionType):
            setattr(monitoring, name, refused)
    return Steps(begin, end)


def traced(most: int, exhausted: Callable[[], NoReturn]) -> Steps:
    set_trace, left, setting = sys.settrace, 0, False

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != PROGRAM:
            return None
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif event == "opcode":
            left -= 1
            if left < 0:
                exhausted()
        return trace

    def keep(event: str, _: tuple[Any, ...]) -> None:
        # Where no frame is left for `trace`, the interpreter would take it away for good and raise what this raises here.
        if event == "sys.settrace" and not setting:
            raise RecursionError("maximum recursion depth exceeded")

    def change(function: Any) -> None:
        nonlocal setting
        setting = True
        set_trace(function)
        setting = False

    def begin() -> None:
        nonlocal left
        left = most
        change(trace)

    sys.addaudithook(keep)
    return Steps(begin, lambda: change(None))
