"""Running programs that a model wrote: no network, no files but a scratch folder of their own, bounded in every way."""

from __future__ import annotations

import os
import threading
import weakref

from stages.sandbox.backends import BACKENDS, Backend
from stages.sandbox.execution import Execution, Outcome, Program, Tests
from stages.sandbox.probe import choose
from stages.sandbox.server import LostError, Server
from stages.sandbox.settings import SandboxSettings

TRIES = 3
"""Servers that a program may lose before that is the program's own doing."""


class Sandbox:
    """Programs run in a back end that `settings` allows; it is looked for, probed and started with the first program.

    One program at a time; several threads take turns, and a process that was forked starts its own. Raises SandboxError if there
    is no back end.
    """

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self._lock = threading.Lock()
        self._servers: list[Server] = []
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._servers, self._owner)

    def find(self) -> Backend:
        """The back end that programs run in; the first time, it is probed and announced. Raises SandboxError."""
        return BACKENDS[choose(self.settings)]

    def run(self, program: Program, tests: Tests | None = None) -> Outcome:
        """What came of the program and of each of its tests."""
        with self._lock:
            for _ in range(TRIES):
                try:
                    server = self._server()
                    try:
                        return Execution(server, self.settings, program, tests).outcome()
                    finally:
                        if server.spent:
                            self._drop()
                except LostError:
                    self._drop()
        return Outcome("error", "the program broke its sandbox")

    def _server(self) -> Server:
        if self._owner != os.getpid():
            self._servers.clear()
            self._owner = os.getpid()
            self._finalizer.detach()
            self._finalizer = weakref.finalize(self, _close, self._servers, self._owner)
        if not self._servers:
            self._servers.append(Server(self.find(), self.settings))
        return self._servers[0]

    def _drop(self) -> None:
        while self._servers:
            self._servers.pop().close()

    def close(self) -> None:
        """End the server; the next program starts another."""
        with self._lock:
            self._drop()


def _close(servers: list[Server], owner: int) -> None:
    if owner == os.getpid():
        while servers:
            servers.pop().close()
