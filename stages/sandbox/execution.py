"""Runs one program in one sandbox server: the program, its outcome, and the messages between host and server."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from stages.sandbox.guest.protocol import MAX_FRAME, MAX_MESSAGE, clip
from stages.sandbox.server import LostError, Server
from stages.sandbox.settings import SandboxSettings

Status = Literal["ok", "compile_error", "error", "timeout", "output"]
Verdict = Literal["pass", "fail", "error", "timeout", "broken", "gone"]


@dataclass(frozen=True)
class Program:
    """`source` is a module. With `entry`, the name of a function with `parameters`, it may also be that function's body or the
    expression it returns; `context` (imports, helpers) is executed before it."""

    source: str
    entry: str | None = None
    parameters: tuple[str, ...] = ()
    context: str = ""


@dataclass(frozen=True)
class Tests:
    __test__ = False  # not a pytest class
    """Statements with asserts, each a test of its own. They call the program's function by its name or as `candidate`."""

    sources: tuple[str, ...]
    context: str = ""


@dataclass(frozen=True)
class TestResult:
    __test__ = False  # not a pytest class
    """`fail`: an assert failed. `error`: the program raised an exception or exited. `timeout`: it took too long. `broken`: the
    test itself can't run. `call` and `value`: the last call of the program's function and its return value, as text."""

    verdict: Verdict
    message: str = ""
    call: str = ""
    value: str = ""


@dataclass(frozen=True)
class Outcome:
    """`status` of loading the program: `ok`; `compile_error`; `error`: it raised an exception or was killed; `timeout`: it took
    too long or too many steps; `output`: it printed too much."""

    status: Status
    message: str = ""
    output: str = ""
    """What it printed to stdout and stderr, up to the limit."""
    results: tuple[TestResult, ...] = ()
    """One per test, if the program was loaded."""

    @property
    def passed(self) -> bool:
        return self.status == "ok" and all(result.verdict == "pass" for result in self.results)


class Channel:
    """One end of a socket: bytes in, messages out."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.data, self.open = end, b"", True

    def read(self) -> None:
        try:
            part = self.end.recv(1 << 16)
        except OSError:
            part = b""
        self.open = bool(part)
        self.data += part

    def messages(self) -> list[dict[str, Any]]:
        """Complete messages received so far. Raises ValueError for malformed ones."""
        found = []
        while len(self.data) >= 4:
            size = int.from_bytes(self.data[:4], "big")
            if size > MAX_FRAME:
                raise ValueError("message too long")
            if len(self.data) < 4 + size:
                break
            message = json.loads(self.data[4 : 4 + size])
            self.data = self.data[4 + size :]
            if not isinstance(message, dict):
                raise ValueError("no message")
            found.append(message)
        return found

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        with suppress(OSError):
            self.end.sendall(len(data).to_bytes(4, "big") + data)


class Execution:
    """One program in one server, from the first fork until all its processes have ended."""

    def __init__(self, server: Server, settings: SandboxSettings, program: Program, tests: Tests | None) -> None:
        self.server, self.settings, self.program, self.tests = server, settings, program, tests
        self.status: Status | None = None
        self.message = ""
        self.printed = b""
        self.results: list[TestResult] = []
        self.loaded = self.late = False
        self.tester: Channel | None = None
        self.stack = ExitStack()

    def outcome(self) -> Outcome:
        """Run the program to its end. Raises LostError if the server is lost."""
        with self.stack:
            self.selector = self.stack.enter_context(selectors.DefaultSelector())
            self.link, self.far_link = self._pair()
            try:
                self._play()
            except BaseException:
                with suppress(LostError):  # Ctrl-C may have ended the server, too, and must not be taken for its loss
                    self.server.end()
                raise
            statuses = self.server.end()
            if "program" not in statuses or (self.tester is not None and "tests" not in statuses):
                raise LostError("it can't fork")
            self.printing.setblocking(False)
            with suppress(BlockingIOError):  # if a leftover process still holds the other end
                while not self.overflow and (part := self.printing.recv(1 << 16)):
                    self.printed += part
        return self._as_outcome(statuses)

    @property
    def overflow(self) -> bool:
        return len(self.printed) > self.settings.output_kb << 10

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        self.stack.callback(ours.close)
        self.stack.callback(theirs.close)
        return ours, theirs

    def _fork(self, role: str, peer: socket.socket, job: dict[str, Any]) -> Channel:
        """The channel to a new fork that works on `job`."""
        ours, theirs = self._pair()
        printing, output = self._pair()
        self.server.fork(role, [theirs, peer, output])
        for end in (theirs, peer, output):
            end.close()
        channel = Channel(ours)
        channel.send(job)
        self.selector.register(ours, selectors.EVENT_READ, channel)
        if role == "program":
            self.selector.register(printing, selectors.EVENT_READ, None)
            self.printing = printing
        return channel

    def _play(self) -> None:
        deadline = time.monotonic() + self.settings.wall_seconds
        program, tests = self.program, self.tests
        job = {"source": program.source, "entry": program.entry, "parameters": program.parameters}
        self.loader = self._fork("program", self.far_link, {**job, "context": program.context, "steps": self.settings.steps})
        while self._waiting():
            left = deadline - time.monotonic()
            events = self.selector.select(left) if left > 0 else []
            if not events:
                self.late = True
                return
            for key, _ in events:
                if key.data is None:
                    self._on_output(key.fileobj)
                else:
                    self._on_messages(key.data)
            if self.loaded and self.tester is None and tests is not None and self.status is None:
                order = {"entry": program.entry, "context": tests.context, "tests": tests.sources}
                self.tester = self._fork("tests", self.link, order)

    def _waiting(self) -> bool:
        """Whether more messages are expected."""
        if self.overflow or self.status is not None:
            return False
        if not self.loaded:
            return self.loader.open
        return (
            self.tests is not None and (self.tester is None or self.tester.open) and len(self.results) < len(self.tests.sources)
        )

    def _on_output(self, end: Any) -> None:
        part = end.recv(1 << 16)
        self.printed += part
        if not part:
            self.selector.unregister(end)

    def _on_messages(self, channel: Channel) -> None:
        channel.read()
        if not channel.open:
            self.selector.unregister(channel.end)
        try:
            messages = channel.messages()
            for message in messages:
                if channel is self.tester:
                    self._on_result(message)
                elif not self.loaded and self.status is None:
                    self._on_status(str(message["status"]), clip(str(message["message"])))
        except (ValueError, KeyError, RecursionError):
            self.status, self.message = "error", "the program wrote into its sandbox's own channel"

    def _on_status(self, status: str, message: str) -> None:
        """Handle the program's report on loading. It can forge this report, but gains nothing beyond being loaded."""
        if status == "ready" and self.program.entry is not None:
            self.loaded = True
        elif status in ("compile_error", "error", "timeout"):
            self.status, self.message = status, message  # type: ignore[assignment]
        elif status == "ok" and self.program.entry is None:
            self.status = "ok"
        else:
            raise ValueError("unknown status")

    def _on_result(self, message: dict[str, Any]) -> None:
        texts = {name: str(message[name])[:MAX_MESSAGE] for name in ("message", "call", "value")}
        self.results.append(TestResult(message["verdict"], **texts))

    def _as_outcome(self, statuses: Mapping[str, int]) -> Outcome:
        """The outcome; for a program that reported none, it is derived from its wait status."""
        output = self.printed[: self.settings.output_kb << 10].decode("utf-8", "backslashreplace")
        if self.overflow:
            return Outcome("output", f"it printed more than {self.settings.output_kb} kB", output)
        if self.status is not None:
            return Outcome(self.status, self.message, output)
        if self.late:
            verdict, message = "timeout", f"more than {self.settings.wall_seconds:g} seconds"
        else:
            verdict, message = cause(statuses["program"], self.settings)
        if not self.loaded or self.tests is None:
            return Outcome(verdict, message, output)  # type: ignore[arg-type]
        gone = TestResult(verdict, message)  # type: ignore[arg-type]
        results = [result if result.verdict != "gone" else replace(gone, call=result.call) for result in self.results]
        results += [gone] * (len(self.tests.sources) - len(results))
        return Outcome("ok", "", output, tuple(results))


def cause(status: int, settings: SandboxSettings) -> tuple[str, str]:
    """Verdict and message for the wait status of a program that ended without reporting."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGXCPU:
        return "timeout", f"more than {settings.cpu_seconds} seconds of processor time"
    if number:
        return "error", f"it was ended by {signal.Signals(number).name}"
    return "error", "it ended by itself"
