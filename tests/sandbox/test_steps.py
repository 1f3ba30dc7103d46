"""The step limit works in every version of Python, counts the same in every run, and cannot be disabled by programs.

The process that runs a program needs only the standard library, so the tests run it in other versions of Python, too: those on
PATH (python3.11 etc.) or listed in BELLWETHER_PYTHONS (paths, separated as in PATH).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from slow import slow_except

from stages.sandbox.backends import LOAD, guest_sources
from stages.sandbox.guest.protocol import encode, receive, send

VERSIONS = ("3.11", "3.12", "3.13")
VARIABLE = "BELLWETHER_PYTHONS"
FORK = f"""{LOAD}
import resource, socket
from stages.sandbox.guest.program import run_program
resource.setrlimit(resource.RLIMIT_CPU, (3, 4))
run_program(*(socket.socket(fileno=int(number)) for number in sys.argv[2:]))
"""
COUNT = f"""{LOAD}
from stages.sandbox.guest.program import compile_program
from stages.sandbox.guest.step_counter import counter
most = 10**9
steps = counter(most, sys.exit)
left = steps.begin.__closure__[steps.begin.__code__.co_freevars.index("left")]

def count(source):
    module = dict()
    exec(compile_program(source, "f", ["n"]), module)
    steps.begin()
    module["f"](1000)
    steps.end()
    return most - left.cell_contents

programs = json.loads(sys.argv[2])
print(json.dumps([[count(source) for source in programs] for _ in range(2)]))
"""
LOOP = "for _ in range(3_000_000): pass"
COUNTED = {
    "for": "def f(n):\n    s = 0\n    for i in range(n):\n        s += i * i\n    return s",
    "while": "def f(n):\n    i = 0\n    while i < n:\n        i += 1\n    return i",
    "comprehension": "def f(n):\n    return sum([x * 2 for x in range(n)])",
    "generator": "def f(n):\n    return sum(x * 2 for x in range(n) if x % 2)",
    "recursion": "def f(n):\n    def g(k): return k if k < 2 else g(k - 1) + g(k - 2)\n    return g(16)",
    "class": "class A:\n    def __init__(self, x): self.x = x\n    def g(self): return self.x\n"
    "def f(n):\n    return [A(i).g() for i in range(n)][-1]",
    "exceptions": "def f(n):\n    c = 0\n    for i in range(n):\n        try: [].pop()\n"
    "        except IndexError: c += 1\n    return c",
    "words": "def f(n):\n    d = {}\n    for i in range(n):\n        k = str(i % 7)\n        d[k] = d.get(k, 0) + 1\n"
    "    return sorted(d.items(), key=lambda kv: -kv[1])[0]",
}
"""Programs of a few thousand steps."""
SPREAD = 0.25
"""Maximum relative difference of counts from those of the first version (docs/sandbox.md)."""


@cache
def python(version: str) -> str:
    """Path of an interpreter of that version; skips the test if there is none."""
    named = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    found = shutil.which(f"python{version}")
    for path in [Path(sys.executable), *named, *([Path(found)] if found else [])]:
        asked = [str(path), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
        except OSError:
            continue
        if answer.stdout.strip() == version:
            return str(path)
    pytest.skip(f"there is no python{version} on PATH, and {VARIABLE} names none")


class Fork:
    """A program loaded in a process of its own."""

    def __init__(self, version: str, source: str, steps: int | None) -> None:
        (self.job, job), (self.peer, peer) = socket.socketpair(), socket.socketpair()
        ends = [job.fileno(), peer.fileno()]
        command = [python(version), "-I", "-c", FORK, guest_sources(), *map(str, ends)]
        self.process = subprocess.Popen(command, pass_fds=ends, stderr=subprocess.PIPE)
        job.close()
        peer.close()
        send(self.job, {"source": source, "entry": "f", "parameters": ["n"], "context": "", "steps": steps})

    def loaded(self) -> dict[str, Any]:
        return receive(self.job)

    def call(self, *arguments: object) -> dict[str, Any]:
        send(self.peer, {"arguments": encode(arguments), "named": encode({})})
        return receive(self.peer)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self.job, self.peer):
            end.close()
        self.process.wait(30)
        assert self.process.stderr is not None
        self.process.stderr.close()


def verdict(version: str, source: str, steps: int | None, *arguments: object) -> str:
    """Outcome of a call: value, raised or timeout; gone if the CPU time limit ended the process."""
    with Fork(version, source, steps) as fork:
        loaded = fork.loaded()
        if loaded["status"] != "ready":
            return str(loaded["status"])
        try:
            return str(fork.call(*(arguments or (1000,)))["status"])
        except EOFError:
            return "gone"


@cache
def counts(version: str) -> dict[str, int]:
    """Steps of each of COUNTED in that version."""
    command = [python(version), "-I", "-c", COUNT, guest_sources(), json.dumps(list(COUNTED.values()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first == second, "counts differ between runs"
    return dict(zip(COUNTED, first, strict=True))


@pytest.mark.parametrize("version", VERSIONS)
def test_long_loop_is_stopped(version: str) -> None:
    """Contract: three million iterations exceed a million steps, in a function and while the module loads."""
    with Fork(version, f"def f(n):\n    {LOOP}\n    return n", 1_000_000) as fork:
        assert fork.loaded()["status"] == "ready"
        assert fork.call(1) == {"status": "timeout", "message": "more than 1000000 steps"}
    with Fork(version, f"{LOOP}\ndef f(n): return n", 1_000_000) as fork:
        assert fork.loaded() == {"status": "timeout", "message": "more than 1000000 steps"}
    assert verdict(version, f"def f(n):\n    {LOOP}\n    return n", None) == "value", "without a limit it runs to its end"


@pytest.mark.parametrize("version", VERSIONS)
def test_step_counts_are_deterministic(version: str) -> None:
    assert all(number > 1000 for number in counts(version).values())


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_step_counts_of_versions_are_similar(version: str) -> None:
    """Contract: a limit means about the same in every version, although their bytecode differs."""
    first, other = counts(VERSIONS[0]), counts(version)
    different = {name: other[name] / first[name] for name in COUNTED if abs(other[name] / first[name] - 1) > SPREAD}
    assert not different


BYPASSES = {
    "settrace": "import sys\nsys.settrace(None)",
    "threading": "import threading, sys\nthreading.settrace(None); sys.settrace(lambda *_: None)",
    "free_tool_id": "import sys\nfor n in range(6): sys.monitoring.free_tool_id(n)",
    "clear_tool_id": "import sys\nfor n in range(6): sys.monitoring.clear_tool_id(n)",
    "set_events": "import sys\nfor n in range(6): sys.monitoring.set_events(n, 0)",
    "set_local_events": "import sys\nfor n in range(6): sys.monitoring.set_local_events(n, f.__code__, 0)",
    "register_callback": "from sys import monitoring as m\nfor n in range(6): m.register_callback(n, m.events.INSTRUCTION, None)",
    "the counter's modules": "import sys\nsys.modules['stages.sandbox.guest.step_counter'].counter = None",
    "an import of them": "import stages.sandbox.guest.step_counter",
    "a copy of the code": "f.__code__ = f.__code__.replace(co_name='g')",
    "recursion": "def g(): g()\ng()",
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bypass", slow_except(BYPASSES, "settrace", "set_local_events"))
def test_step_counter_cannot_be_disabled(version: str, bypass: str) -> None:
    """Contract: neither while the module loads nor in a call."""
    attempt = "\n".join(f"    {line}" for line in BYPASSES[bypass].splitlines())
    before = f"def f(n):\n    {LOOP}\ntry:\n{attempt}\nexcept BaseException: pass"
    assert verdict(version, before, 1_000_000) == "timeout"
    attempt = attempt.replace("\n", "\n    ")
    inside = f"def f(n):\n    try:\n    {attempt}\n    except BaseException: pass\n    {LOOP}"
    assert verdict(version, inside, 1_000_000) == "timeout"
