"""What hostile programs try, one by one; each names what it got, and the sandbox answers as ever afterwards."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stages.sandbox import Program, Sandbox, Tests
from stages.sandbox.backends import SAFE

pytestmark = pytest.mark.long(25)

PREVENTED = """
def attempt():
{body}
try:
    print("got", attempt())
except (OSError, MemoryError, AttributeError) as error:
    print("prevented", type(error).__name__)
"""


def attempted(sandbox: Sandbox, body: str) -> str:
    """What a program prints of `body`: "prevented ..." or "got ..."."""
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    outcome = sandbox.run(Program(PREVENTED.format(body=indented)))
    assert outcome.status == "ok", outcome
    return outcome.output.strip()


def still_works(sandbox: Sandbox) -> bool:
    return sandbox.run(Program("x * 2", "f", ("x",)), Tests(("assert f(21) == 42",))).passed


@pytest.fixture(autouse=True)
def _works_afterwards(request: pytest.FixtureRequest):
    yield
    for name in {"sandbox", "bubblewrap"} & set(request.fixturenames):
        assert still_works(request.getfixturevalue(name))


def test_files_of_the_host_can_not_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    for path in (secret, Path("/etc/shadow"), Path("/etc/passwd"), Path(__file__)):
        assert attempted(sandbox, f"return open({str(path)!r}).read()").startswith("prevented"), path


def test_nothing_of_home_is_seen(sandbox: Sandbox) -> None:
    """Contract: where the path of the interpreter leads through the home folder, nothing else of that is there."""
    for name in (".ssh", ".bashrc", ".profile", ".gitconfig", ".config"):
        assert attempted(sandbox, f"import os; return os.listdir({str(Path.home() / name)!r})").startswith("prevented")
        assert attempted(sandbox, f"return open({str(Path.home() / name)!r}).read()").startswith("prevented")


def test_variables_of_the_host_are_not_there(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    sandbox.close()  # the next server starts with the variable around
    assert attempted(sandbox, "import os; return os.environ.get('API_KEY')") == "got None"
    assert "secret" not in attempted(sandbox, "return open('/proc/self/environ').read()")


def test_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        connect = f"import socket; return socket.create_connection(('127.0.0.1', {port}), 1)"
        assert attempted(sandbox, connect).startswith("prevented")
    assert attempted(sandbox, "import socket; return socket.create_connection(('192.0.2.1', 80), 1)").startswith("prevented")
    send = "import socket; return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))"
    assert attempted(sandbox, send).startswith("prevented")


def test_sockets_of_the_host_can_not_be_reached(sandbox: Sandbox, tmp_path: Path) -> None:
    """By path and in the abstract namespace."""
    for address in (str(tmp_path / "socket"), f"\0sandbox-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            body = f"import socket; return socket.socket(socket.AF_UNIX).connect({address!r})"
            assert attempted(sandbox, body).startswith("prevented"), address


def test_forking_without_end_is_bounded(sandbox: Sandbox) -> None:
    body = """
import os, time
for count in range(1000):
    if os.fork() == 0:
        time.sleep(60)
return count"""
    assert attempted(sandbox, body) == "prevented BlockingIOError"
    bomb = sandbox.run(Program("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"))
    assert bomb.status in ("timeout", "error")
    threads = "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(60,)).start()"
    assert sandbox.run(Program(threads)).status == "error"


@pytest.mark.parametrize(
    "amount", ["bytearray(1 << 33)", "[0] * (1 << 30)", "'x' * (1 << 32)", "[list(range(9999)) for _ in range(9999)]"]
)
def test_allocating_without_end_is_bounded(sandbox: Sandbox, amount: str) -> None:
    outcome = sandbox.run(Program(f"print(len({amount}))"))
    assert outcome.status == "error"
    assert outcome.output == ""


def test_shared_memory_is_gone_with_the_program(bubblewrap: Sandbox) -> None:
    """Contract: System V shared memory, which outlives processes, does not outlive the program."""
    make = "import ctypes; return ctypes.CDLL(None).shmget(4711, 4096, 0o1666)"
    assert "got" in attempted(bubblewrap, make)
    assert attempted(bubblewrap, "import ctypes; return ctypes.CDLL(None).shmget(4711, 4096, 0)") == "got -1"


@pytest.mark.parametrize("path", ["/usr/x", "/x", "/root/x", "/tmp/x", "/etc/x", "/dev/shm/x", "/proc/sys/kernel/hostname"])
def test_writing_outside_is_prevented(sandbox: Sandbox, path: str) -> None:
    assert attempted(sandbox, f"return open({path!r}, 'w').write('x')").startswith("prevented")
    assert not Path(path).exists() or "/proc/" in path


def test_writing_without_end_is_bounded(sandbox: Sandbox) -> None:
    one = "return open('big', 'wb').write(bytes(1 << 21))"
    assert attempted(sandbox, one).startswith("prevented")


def test_the_scratch_folder_is_bounded_and_private(bubblewrap: Sandbox) -> None:
    many = "for number in range(100): open(str(number), 'wb').write(bytes(1 << 19))\nreturn 'all'"
    assert attempted(bubblewrap, many).startswith("prevented")
    assert attempted(bubblewrap, "import os; return os.listdir('.')") == "got []"
    nested = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"
    bubblewrap.run(Program(nested))
    assert attempted(bubblewrap, "import os; return os.listdir('.')") == "got []"
    shut = "import os; os.mkdir('d'); open('d/x', 'w').close(); os.chmod('d', 0); return 'shut'"
    assert attempted(bubblewrap, shut) == "got shut"
    assert attempted(bubblewrap, "import os; return os.listdir('.')") == "got []"


def test_processes_of_the_host_can_not_be_signalled(sandbox: Sandbox) -> None:
    for pid in (os.getpid(), os.getppid()):
        assert attempted(sandbox, f"import os; return os.kill({pid}, 0)").startswith("prevented")


def test_the_server_can_not_be_ended_from_within(bubblewrap: Sandbox) -> None:
    """Contract: signals to the parent, or to everyone, end nobody but the program itself."""
    still_works(bubblewrap)
    server = bubblewrap._servers[0]
    for number in (9, 15, 19, 11):
        bubblewrap.run(Program(f"import os\nos.kill(os.getppid(), {number})\nos.kill(1, {number})"))
        bubblewrap.run(Program(f"import os\nos.kill(-1, {number})"))
    assert still_works(bubblewrap)
    assert bubblewrap._servers[0] is server


def test_the_server_can_not_be_looked_into(bubblewrap: Sandbox) -> None:
    """Contract: no tracing of processes of the same user (PTRACE_ATTACH 16) and no reading of their memory."""
    trace = "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0): raise OSError\nreturn 'attached'"
    assert attempted(bubblewrap, trace).startswith("prevented")
    assert attempted(bubblewrap, "return open('/proc/1/mem', 'rb').read(1)").startswith("prevented")


def test_printing_without_end_is_bounded(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Program("import os\nwhile True: os.write(1, b'x' * 4096)"))
    assert outcome.status == "output"
    assert outcome.output == "x" * (64 << 10)


@pytest.mark.parametrize("backend", SAFE)
def test_sleeping_is_bounded(open_sandbox: Callable[..., Sandbox], backend: str) -> None:
    impatient = open_sandbox(backend, wall_seconds=2.5)
    assert impatient.run(Program("import time; time.sleep(60)")).status == "timeout"
    tests = Tests(("assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"))
    outcome = impatient.run(Program("def f(x):\n    import time\n    if x == 2: time.sleep(60)\n    return x", "f"), tests)
    assert [result.verdict for result in outcome.results] == ["pass", "timeout", "timeout"]


@pytest.mark.parametrize(
    "loop", ["while True: pass", "sum(iter(int, 1))", "try:\n    while True: pass\nexcept BaseException: pass"]
)
def test_running_without_end_is_bounded(sandbox: Sandbox, loop: str) -> None:
    assert sandbox.run(Program(loop)).status == "timeout"


def test_a_process_left_behind_is_ended(sandbox: Sandbox) -> None:
    """Contract: also one that left the program's session and outlived its parent."""
    mark = f"sandbox-left-{os.getpid()}"
    body = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])
    os._exit(0)
os.wait()
return 'left'"""
    assert attempted(sandbox, body) in ("got left", "prevented PermissionError")
    found = [process.pid for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]
    assert found == []


def test_no_nested_user_namespaces(sandbox: Sandbox) -> None:
    clone = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nif libc.unshare(0x10000000): raise OSError\nreturn 'nested'"
    assert attempted(sandbox, clone).startswith("prevented")
    outcome = sandbox.run(Program("import subprocess; subprocess.run(['unshare', '-Ur', 'id'], check=True)"))
    assert outcome.status == "error"
    assert "uid=0" not in outcome.output
