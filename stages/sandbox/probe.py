"""Finds a back end that works on this machine: each is started and attacked before it is trusted, once per process."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from functools import cache
from multiprocessing import parent_process
from pathlib import Path

from stages.sandbox.backends import BACKENDS, SAFE, Backend
from stages.sandbox.execution import Execution, Program
from stages.sandbox.server import LostError, SandboxError, Server
from stages.sandbox.settings import SandboxSettings

ATTACK = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None)
def holds(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
def connect():
    socket.create_connection(("127.0.0.1", {port}), 1.0).close()
def write(path):
    with open(path, "w") as file:
        file.write("x")
def share():
    made = libc.shmget(0, 4096, 0o1600)
    if made >= 0:
        libc.shmctl(made, 0, None)
    elif libc.memfd_create(b"x", 0) < 0:
        raise OSError
held = {{
    "reading a file of the host": holds(lambda: open({secret!r}).read()),
    "connecting to the host": holds(connect),
    "signalling a process of the host": holds(lambda: os.kill({pid}, 0)),
    "writing beside a file of the host": holds(lambda: write({beside!r})),
    "writing to the system": holds(lambda: write("/usr/sandbox-probe")),
    "allocating memory outside the limits": holds(share),
    "reading the host's environment variables": "SANDBOX_PROBE" not in os.environ,
}}
write("scratch")
print("|".join(name for name, held in held.items() if not held))
"""


def breaches(backend: Backend) -> str | None:
    """What `backend` fails to prevent, or why it does not start; None if it can be trusted."""
    settings = SandboxSettings()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        secret = Path(folder) / "secret"
        secret.write_text("secret", encoding="utf-8")
        for path, mode in ((Path(folder), 0o777), (secret, 0o666)):
            path.chmod(mode)
        port = listening.getsockname()[1]
        source = ATTACK.format(port=port, secret=str(secret), beside=f"{folder}/beside", pid=os.getpid())
        os.environ["SANDBOX_PROBE"] = "1"
        try:
            server = Server(backend, settings)
        except SandboxError as error:
            return str(error)
        finally:
            del os.environ["SANDBOX_PROBE"]
        try:
            outcome = Execution(server, settings, Program(source), None).outcome()
        except LostError as error:
            return f"its server was lost: {error}"
        finally:
            server.close()
    if outcome.status != "ok":
        return f"the probe program ended with {outcome.status}: {outcome.message} {outcome.output}".strip()
    succeeded = outcome.output.strip()
    return f"it does not prevent {succeeded.replace('|', ', ')}" if succeeded else None


@cache
def fault(name: str) -> str | None:
    """Why the back end can't be used on this machine; None if it can."""
    backend = BACKENDS[name]
    return backend.missing() or (breaches(backend) if backend.isolates else None)


@cache
def _choose(name: str) -> str:
    tried = SAFE if name == "auto" else (name,)
    for candidate in tried:
        if fault(candidate) is None:
            if parent_process() is None:
                _announce(BACKENDS[candidate])
            return candidate
    reasons = "".join(f"\n- {candidate}: {fault(candidate)}" for candidate in tried)
    raise SandboxError(
        f"no sandbox is available on this machine for programs that a model writes:{reasons}\nInstall one of them. Only if you "
        "trust every program with everything your user can do, set sandbox.backend: unsafe_subprocess in "
        "per_domain.code.environment of params.yaml instead"
    )


def choose(settings: SandboxSettings) -> str:
    """The name of the back end that programs run in, announced once. Raises SandboxError with the reason for each candidate."""
    return _choose(settings.backend)


def _announce(backend: Backend) -> None:
    if backend.isolates:
        print(f"sandbox: programs run in {backend.title}", file=sys.stderr, flush=True)
    else:
        print(
            "sandbox: WARNING: sandbox.backend is unsafe_subprocess: programs that the model writes can read, change and send "
            "anything your user can",
            file=sys.stderr,
            flush=True,
        )
