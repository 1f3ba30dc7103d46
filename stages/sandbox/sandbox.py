"""Runs programs written by a model: no network, no files but their own scratch folder, and limits on every resource."""

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
"""Servers a program may crash before the program itself is blamed."""


class Sandbox:
    """Runs programs in a back end that `settings` allows, which the first program selects, probes and starts.

    Programs run one at a time: threads take turns, and a forked process or an unpickled copy starts its own server. Raises
    SandboxError if no back end is available.
    """

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self._lock = threading.Lock()
        self._servers: list[Server] = []
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._servers, self._owner)

    def __reduce__(self) -> tuple[type[Sandbox], tuple[SandboxSettings]]:
        return Sandbox, (self.settings,)

    def find(self) -> Backend:
        """The back end that programs run in; the first call probes and announces it. Raises SandboxError."""
        return BACKENDS[choose(self.settings)]

    def run(self, program: Program, tests: Tests | None = None) -> Outcome:
        """The outcome of the program and of each test."""
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
        """Stop the server; the next program starts a new one."""
        with self._lock:
            self._drop()


def _close(servers: list[Server], owner: int) -> None:
    if owner == os.getpid():
        while servers:
            servers.pop().close()
