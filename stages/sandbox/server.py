"""The host's side of the sandbox server (stages/sandbox/guest): start it, request forks, stop it."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from stages.sandbox.backends import Backend
from stages.sandbox.settings import SandboxSettings

START_SECONDS, REPLY_SECONDS = 30.0, 10.0
REPOSITORY = Path(__file__).resolve().parents[2]


class SandboxError(OSError):
    """No sandbox is available, or it does not start."""


class LostError(RuntimeError):
    """The server does not respond as expected; it must be discarded and a new one started."""


class Server:
    """A sandbox with a server in it. Raises SandboxError with the server's output if it does not start."""

    def __init__(self, backend: Backend, settings: SandboxSettings) -> None:
        self.scratch = None if backend.warm else Path(tempfile.mkdtemp(prefix="sandbox-"))
        self.control, theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] | None = None
        self.spent = not backend.warm
        """True if the server must not run another program, because the last one may have left something behind."""
        try:
            with tempfile.TemporaryFile() as log:
                self._start(backend.command(settings, self.scratch), theirs, log)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def _start(self, command: Sequence[str], theirs: socket.socket, log: IO[bytes]) -> None:
        try:
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=log, stderr=log, cwd=REPOSITORY)
            theirs.close()
            self.control.settimeout(START_SECONDS)
            answer = self._line()
        except (OSError, LostError) as error:
            if self.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(1.0)
            log.seek(0)
            text = log.read().decode(errors="replace").strip() or str(error)
            raise SandboxError(f"{command[0]} does not start: {text[-500:]}") from error
        if answer != "ready":
            raise SandboxError(f"{command[0]} replied {answer!r} instead of 'ready'")
        self.control.settimeout(REPLY_SECONDS)

    def _line(self) -> str:
        data = b""
        while not data.endswith(b"\n"):
            try:
                part = self.control.recv(4096)
            except OSError as error:
                raise LostError(str(error)) from error
            if not part:
                raise LostError("it ended")
            data += part
        return data.decode(errors="replace").strip()

    def fork(self, role: str, sockets: Sequence[socket.socket]) -> None:
        """Start a fork that takes over the sockets (job, peer, output). Raises LostError."""
        try:
            socket.send_fds(self.control, [role.encode()], [one.fileno() for one in sockets])
        except OSError as error:
            raise LostError(str(error)) from error

    def end(self) -> Mapping[str, int]:
        """Kill all forks and their descendants; return role -> wait status. Raises LostError."""
        try:
            self.control.sendall(b"end")
        except OSError as error:
            raise LostError(str(error)) from error
        answer = json.loads(self._line())
        self.spent = self.spent or not answer["clean"]
        statuses: Mapping[str, int] = answer["statuses"]
        return statuses

    def close(self) -> None:
        """Close the connection, which ends the server and its namespaces."""
        self.control.close()
        if self.process is not None:
            try:
                self.process.wait(REPLY_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.scratch is not None:
            with suppress(OSError):
                remove(self.scratch)


def remove(folder: Path) -> None:
    """Delete a folder and everything a program wrote there, however deeply nested and whatever its permissions. Nested entries
    move up first, so that neither path length nor recursion depth grows. Raises OSError."""
    while entries := list(folder.iterdir()):
        for entry in entries:
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
                continue
            entry.chmod(0o700)
            for nested in list(entry.iterdir()):
                if nested.is_dir() and not nested.is_symlink():
                    nested.chmod(0o700)
                nested.rename(folder / secrets.token_hex(16))
            entry.rmdir()
    folder.rmdir()
