"""Counts the bytecode instructions of a program, so that an endless loop is stopped at the same point on every machine.

Only code compiled as PROGRAM is counted. From Python 3.12 on, the interpreter reports its instructions in all threads
(`sys.monitoring`); before, a trace function receives them in the calling thread. Counts are the same in every run of one version
of Python, but differ between versions, whose compilers emit different bytecode.

Programs are refused the calls that would disable the counter. A program that finds the counter in its own process (frames, gc,
ctypes), or compiles code under another name (exec), runs uncounted until the kernel's CPU limit kills it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

PROGRAM = "<program>"
"""File name of the code that is counted."""
TOOL = 4
"""One of `sys.monitoring`'s six tool ids, which no debugger, profiler or coverage tool uses."""


class Steps(NamedTuple):
    """`begin` starts counting from zero, `end` stops. Both are closures over the count, so that no attribute exposes it."""

    begin: Callable[[], None]
    end: Callable[[], None]


def refused(*_: object, **__: object) -> NoReturn:
    raise PermissionError("the sandbox counts this program's instructions: it can't trace or monitor itself")


def counter(most: int | None, exhausted: Callable[[], NoReturn]) -> Steps:
    """Call `exhausted`, which does not return, at the first instruction after a `begin` that exceeds `most`. None: count and
    refuse nothing."""
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
        return disable  # one start event per function is enough

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
        # When the stack has no room for a frame of `trace`, the interpreter would remove it for good; raising here prevents that.
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
