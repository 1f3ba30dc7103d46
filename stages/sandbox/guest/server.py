"""The server: forks processes, and kills them with all their descendants."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from stages.sandbox.guest.program import run_program
from stages.sandbox.guest.syscalls import deny
from stages.sandbox.guest.test_runner import run_tests


def limit(settings: Mapping[str, Any]) -> None:
    """Limit the resources of this process and its children. All limits are hard except CPU time: its soft limit sends SIGXCPU,
    which tells a timeout from other kills."""
    megabyte = 1 << 20
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, settings["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, settings["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_seconds"], settings["cpu_seconds"] + 1))
    if settings["count_processes"]:
        # Two more, for the server and the tests, which must be able to fork when the program has reached its limit.
        resource.setrlimit(resource.RLIMIT_NPROC, (settings["processes"] + 2, settings["processes"] + 2))


def hide() -> None:
    """Keep other processes of the same user from inspecting this process and its forks (PR_SET_DUMPABLE 0)."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


def fork(role: str, sockets: Sequence[int], control: socket.socket, settings: Mapping[str, Any]) -> int:
    """The fork's pid, in the server. In the fork, do its work and never return."""
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        os.setsid()
        job, peer, output = sockets
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.chdir(settings["scratch"])
        limit(settings)
        roles = {"program": run_program, "tests": run_tests}
        roles[role](socket.socket(fileno=job), socket.socket(fileno=peer))
    except BaseException:
        os._exit(70)
    os._exit(0)


def reap(alone: bool, forked: Mapping[int, str]) -> dict[str, int]:
    """Kill the forks and wait for them; return role -> wait status. `alone`: this is process 1 of its own namespace, so every
    other process in it was left behind by programs and is killed too."""
    statuses: dict[int, int] = {}
    while True:
        if alone:
            with suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        else:
            for number in forked.keys() - statuses.keys():
                with suppress(OSError):
                    os.killpg(number, signal.SIGKILL)
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return {forked[number]: value for number, value in statuses.items()}
        if pid in forked:
            statuses[pid] = status


def clear(scratch: str) -> None:
    """Empty the scratch folder. Raises OSError or RecursionError if that fails; the sandbox is then discarded."""
    with os.scandir(scratch) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def serve(settings: Mapping[str, Any]) -> None:
    """Handle requests until the host disconnects: "program" and "tests" (fork with the three sockets received) and "end" (kill
    all forks)."""
    control = socket.socket(fileno=os.dup(0))
    hide()
    if settings["filtered"]:
        try:
            deny()  # once: forks inherit the filter
        except OSError as error:
            raise SystemExit(str(error)) from None
    alone = os.getpid() == 1
    for name in ("collections", "functools", "heapq", "itertools", "math", "random", "string", "typing"):
        __import__(name)
    gc.collect()
    gc.freeze()
    forked: dict[int, str] = {}
    control.sendall(b"ready\n")
    while True:
        request, sockets, _, _ = socket.recv_fds(control, 16, 3)
        role = request.decode()
        if not role:
            return
        if role == "end":
            statuses = reap(alone, forked)
            forked.clear()
            clean = alone
            if alone:  # other servers end after one program, and the host removes their folder
                try:
                    clear(settings["scratch"])
                except (OSError, RecursionError):
                    clean = False
            control.sendall(json.dumps({"statuses": statuses, "clean": clean}).encode() + b"\n")
            continue
        with suppress(OSError):  # the host then misses this role's status
            forked[fork(role, sockets, control, settings)] = role
        for number in sockets:
            os.close(number)
