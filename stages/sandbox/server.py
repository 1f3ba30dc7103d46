"""The host's side of the server in the sandbox (stages/sandbox/guest): starting it, asking it to fork, ending it."""

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
    """There is no sandbox, or it does not start."""


class LostError(RuntimeError):
    """The server does not answer as it should: it is thrown away, and another one started."""


class Server:
    """One sandbox with a server in it. Raises SandboxError, with what was printed, if it does not start."""

    def __init__(self, backend: Backend, settings: SandboxSettings) -> None:
        self.scratch = None if backend.warm else Path(tempfile.mkdtemp(prefix="sandbox-"))
        self.control, theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] | None = None
        self.spent = not backend.warm
        """Not to be used for another program: something of the last one is still in there."""
        try:
            with tempfile.TemporaryFile() as said:
                self._start(backend.command(settings, self.scratch), theirs, said)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def _start(self, command: Sequence[str], theirs: socket.socket, said: IO[bytes]) -> None:
        try:
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=said, stderr=said, cwd=REPOSITORY)
            theirs.close()
            self.control.settimeout(START_SECONDS)
            answer = self._line()
        except (OSError, LostError) as error:
            if self.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(1.0)
            said.seek(0)
            text = said.read().decode(errors="replace").strip() or str(error)
            raise SandboxError(f"{command[0]} does not start: {text[-500:]}") from error
        if answer != "ready":
            raise SandboxError(f"{command[0]} answers {answer!r}")
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
        """A fork takes over job, peer and output. Raises LostError."""
        try:
            socket.send_fds(self.control, [role.encode()], [one.fileno() for one in sockets])
        except OSError as error:
            raise LostError(str(error)) from error

    def end(self) -> Mapping[str, int]:
        """End all that was forked, and what it left: role -> wait status. Raises LostError."""
        try:
            self.control.sendall(b"end")
        except OSError as error:
            raise LostError(str(error)) from error
        answer = json.loads(self._line())
        self.spent = self.spent or not answer["clean"]
        statuses: Mapping[str, int] = answer["statuses"]
        return statuses

    def close(self) -> None:
        """Hang up; the server ends, and with it its namespaces."""
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
    """A folder and all that a program wrote there, however deep and whatever may not be entered: what is nested moves up, so that
    neither paths nor recursion grow with it. Raises OSError."""
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
