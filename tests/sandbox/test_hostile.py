"""A series of hostile programs affects no later program and leaves nothing behind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stages.sandbox import Program, Sandbox, Tests
from stages.sandbox.backends import SAFE

pytestmark = pytest.mark.long(60)

HOSTILE = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "import os\nfor _ in range(9):\n    try: os.fork()\n    except OSError: break\nimport time; time.sleep(60)",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import os\nos.kill(-1, 9)",
    "import os\nos.kill(1, 9)\nos.kill(os.getppid(), 15)",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time; time.sleep(600)",
    "for number in range(999): open(str(number), 'w').write('x' * 4096)",
    "import os\nfor _ in range(2000):\n    os.mkdir('d'); os.chdir('d')",
    "import os\nfor number in range(3, 999):\n    try: os.write(number, b'\\xff' * 64)\n    except OSError: pass",
    "import os, signal\nfor number in range(3, 99):\n    try: os.close(number)\n    except OSError: pass",
    "import ctypes; ctypes.string_at(0)",
    "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "import ctypes\nfor key in range(1, 99): ctypes.CDLL(None).shmget(key, 1 << 20, 0o1666)",
    "open('/etc/passwd').read()",
    "import socket; socket.create_connection(('127.0.0.1', 80))",
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "raise SystemExit",
    "while True: pass",
    "(" * 5000,
)
GOOD, GOOD_TESTS = Program("x * 2", "f", ("x",)), Tests(("assert f(21) == 42",))


def state(sandbox: Sandbox) -> tuple[int, int]:
    """Numbers of open files and of child processes after closing the sandbox."""
    sandbox.close()
    return len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))


def good_passes(sandbox: Sandbox) -> bool:
    """Whether a good program passes in the same server, with enough time for a busy machine."""
    original, sandbox.settings = sandbox.settings, sandbox.settings.model_copy(update={"wall_seconds": 120.0})
    try:
        return sandbox.run(GOOD, GOOD_TESTS).passed
    finally:
        sandbox.settings = original


def assert_no_lasting_effect(sandbox: Sandbox, count: int, tmp_path: Path) -> None:
    """A good program passes after every tenth hostile one, and each hostile one's outcome is always the same."""
    assert good_passes(sandbox)
    before, seen = state(sandbox), {}
    for number in range(count):
        source = HOSTILE[number % len(HOSTILE)]
        as_function = number // len(HOSTILE) % 2 == 1
        body = "def f(x):\n" + "".join(f"    {line}\n" for line in source.splitlines())
        outcome = sandbox.run(Program(body, "f"), GOOD_TESTS) if as_function else sandbox.run(Program(source))
        assert not (as_function and outcome.passed), source
        seen.setdefault((source, as_function), Counter())[outcome.status] += 1
        if number % 10 == 9:
            assert good_passes(sandbox), f"after {source}"
    assert state(sandbox) == before
    assert list(tmp_path.iterdir()) == []
    for (source, as_function), statuses in seen.items():
        # On a busy machine a program may time out before it reaches another limit.
        assert len(statuses.keys() - {"timeout"}) <= 1, (source, as_function, statuses)


@pytest.fixture
def open_hostile(open_sandbox: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Sandbox]:
    """open_sandbox with its own folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return open_sandbox


@pytest.mark.parametrize("backend", [SAFE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SAFE[1:])])
def test_hostile_programs_in_a_row(open_hostile: Callable[..., Sandbox], backend: str, tmp_path: Path) -> None:
    assert_no_lasting_effect(open_hostile(backend, wall_seconds=1.0), len(HOSTILE) * 2, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_hostile_programs_in_a_row(open_hostile: Callable[..., Sandbox], tmp_path: Path) -> None:
    assert_no_lasting_effect(open_hostile("bubblewrap", wall_seconds=1.0), 1000, tmp_path)
