"""Attempts of hostile programs, one by one; the sandbox still works after each."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stages.sandbox import Program, Sandbox, SandboxSettings, Tests, backends
from stages.sandbox.backends import BACKENDS, SAFE
from stages.sandbox.guest.syscalls import DENIED, X32
from stages.sandbox.probe import breaches, fault
from stages.sandbox.server import remove

pytestmark = pytest.mark.long(125)

PREVENTED = """
def attempt():
{body}
try:
    print("got", attempt())
except (OSError, MemoryError, AttributeError) as error:
    print("prevented", type(error).__name__)
"""


def attempt(body: str) -> Program:
    return Program(PREVENTED.format(body="".join(f"    {line}\n" for line in body.strip().splitlines())))


def attempted(sandbox: Sandbox, body: str) -> str:
    """Output of a program that tries `body`: "prevented ..." or "got ..."."""
    outcome = sandbox.run(attempt(body))
    assert outcome.status == "ok", outcome
    return outcome.output.strip()


def still_works(sandbox: Sandbox) -> bool:
    return sandbox.run(Program("x * 2", "f", ("x",)), Tests(("assert f(21) == 42",))).passed


@pytest.fixture(autouse=True)
def _works_afterwards(request: pytest.FixtureRequest):
    yield
    for name in {"sandbox", "bubblewrap"} & set(request.fixturenames):
        assert still_works(request.getfixturevalue(name))


def test_host_files_cannot_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    for path in (secret, Path("/etc/shadow"), Path("/etc/passwd"), Path(__file__)):
        assert attempted(sandbox, f"return open({str(path)!r}).read()").startswith("prevented"), path


def test_home_folder_is_not_visible(sandbox: Sandbox) -> None:
    """Contract: even if the interpreter's path leads through the home folder, nothing else of it is visible."""
    for name in (".ssh", ".bashrc", ".profile", ".gitconfig", ".config"):
        assert attempted(sandbox, f"import os; return os.listdir({str(Path.home() / name)!r})").startswith("prevented")
        assert attempted(sandbox, f"return open({str(Path.home() / name)!r}).read()").startswith("prevented")


def test_host_environment_variables_are_not_visible(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    sandbox.close()  # the next server starts with the variable set
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


def test_host_sockets_cannot_be_reached(sandbox: Sandbox, tmp_path: Path) -> None:
    """By path and in the abstract namespace."""
    for address in (str(tmp_path / "socket"), f"\0sandbox-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            body = f"import socket; return socket.socket(socket.AF_UNIX).connect({address!r})"
            assert attempted(sandbox, body).startswith("prevented"), address


def test_fork_bomb_is_bounded(sandbox: Sandbox) -> None:
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
def test_memory_is_bounded(sandbox: Sandbox, amount: str) -> None:
    outcome = sandbox.run(Program(f"print(len({amount}))"))
    assert outcome.status == "error"
    assert outcome.output == ""


DETACHED = {
    "System V": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]
for megabytes in range(0, 256, 32):
    made = libc.shmget(0, 32 << 20, 0o1600)
    if made < 0:
        raise OSError(ctypes.get_errno(), megabytes)
    place = libc.shmat(made, None, 0)
    libc.shmctl(made, 0, None)
    ctypes.memset(place, 1, 32 << 20)
    held.append(made)
    libc.shmdt(place)
return megabytes""",
    "anonymous file": """
import os
for megabytes in range(256):
    held.append(os.memfd_create("x"))
    os.write(held[-1], bytes(1 << 20))
return megabytes""",
}


@pytest.mark.parametrize("way", DETACHED)
def test_memory_outside_the_address_space_is_denied(sandbox: Sandbox, way: str) -> None:
    """Contract: memory that RLIMIT_AS does not count, since no process has it in its address space, cannot be allocated."""
    assert attempted(sandbox, "held = []\n" + DETACHED[way].strip()) == "prevented PermissionError"


KILLED = ("it was ended by SIGSYS", "it was ended by SIGSEGV")
"""By sandlock, which kills a program for such calls, or by a kernel without 32-bit programs."""
CALLS = ("shmget", "semget", "msgget", "memfd_create", "memfd_secret", "io_uring_setup")


def test_denied_system_calls_give_eperm(sandbox: Sandbox) -> None:
    """Contract: so do calls with x86_64's x32 numbers, unless the program is killed for them."""
    known = DENIED[os.uname().machine][1]
    assert set(known) == set(CALLS)
    call = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = [ctypes.c_long] * 4
return [(libc.syscall(number, 0, 0, 0), ctypes.get_errno()) for number in {numbers}]"""
    denied = f"got {[(-1, errno.EPERM)] * len(known)}"
    assert attempted(sandbox, call.format(numbers=[*known.values()])) == denied
    if os.uname().machine == "x86_64":
        outcome = sandbox.run(attempt(call.format(numbers=[X32 | number for number in known.values()])))
        assert outcome.output.strip() == denied or outcome.message in KILLED, outcome


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code of x86_64")
def test_32_bit_system_calls_are_denied(sandbox: Sandbox) -> None:
    """Contract: shmget as a 32-bit program calls it (number 395, by interrupt 0x80) is denied; -1 is EPERM here."""
    code = "53b88b01000031dbb900100000ba80030000cd805bc3"  # push rbx; eax = 395; ebx = 0; ecx = 4096; edx = 0o1600; int 0x80; ...
    body = f"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex({code!r}))
return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"""
    outcome = sandbox.run(attempt(body))
    assert outcome.output.strip() == "got -1" or outcome.message in KILLED, outcome


def test_machine_without_system_call_filter_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a back end is never used without its filter; the reason names the machine."""
    wanted = next((name for name in SAFE if fault(name) is None), None)
    if wanted is None:
        pytest.skip("no back end works here")
    whole = backends.server_command()
    other = [*whole[:-1], whole[-1].replace("os.uname().machine", "'riscv64'")]
    assert other != whole
    monkeypatch.setattr(backends, "server_command", lambda: other)
    reason = breaches(BACKENDS[wanted])
    assert reason is not None
    assert "does not start: there is no system call filter for this Python on riscv64; only 64-bit" in reason
    unsafe = Sandbox(SandboxSettings(backend="unsafe_subprocess"))
    assert unsafe.run(Program("print(42)")).output == "42\n"
    unsafe.close()


@pytest.mark.parametrize("path", ["/usr/x", "/x", "/root/x", "/tmp/x", "/etc/x", "/dev/shm/x", "/proc/sys/kernel/hostname"])
def test_writing_outside_the_scratch_folder_is_prevented(sandbox: Sandbox, path: str) -> None:
    assert attempted(sandbox, f"return open({path!r}, 'w').write('x')").startswith("prevented")
    assert not Path(path).exists() or "/proc/" in path


def test_file_size_is_bounded(sandbox: Sandbox) -> None:
    one = "return open('big', 'wb').write(bytes(1 << 21))"
    assert attempted(sandbox, one).startswith("prevented")


def test_scratch_folder_is_bounded_and_private(bubblewrap: Sandbox) -> None:
    many = "for number in range(100): open(str(number), 'wb').write(bytes(1 << 19))\nreturn 'all'"
    assert attempted(bubblewrap, many).startswith("prevented")
    assert attempted(bubblewrap, "import os; return os.listdir('.')") == "got []"
    nested = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"
    bubblewrap.run(Program(nested))
    assert attempted(bubblewrap, "import os; return os.listdir('.')") == "got []"
    shut = "import os; os.mkdir('d'); open('d/x', 'w').close(); os.chmod('d', 0); return 'shut'"
    assert attempted(bubblewrap, shut) == "got shut"
    assert attempted(bubblewrap, "import os; return os.listdir('.')") == "got []"


def test_deeply_nested_files_are_removed(tmp_path: Path) -> None:
    """Contract: removal on the host neither recurses nor builds long paths, whose depth a program could choose."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "kept").mkdir()
    (scratch / "link").symlink_to(tmp_path / "kept")
    (scratch / "file").write_text("x")
    here = os.open(scratch, os.O_RDONLY)
    for _ in range(2100):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.chmod(here, 0)
    os.close(here)
    remove(scratch)
    assert os.listdir(tmp_path) == ["kept"]


def test_host_processes_cannot_be_signalled(sandbox: Sandbox) -> None:
    for pid in (os.getpid(), os.getppid()):
        assert attempted(sandbox, f"import os; return os.kill({pid}, 0)").startswith("prevented")


def test_server_cannot_be_killed_from_within(bubblewrap: Sandbox) -> None:
    """Contract: signals to the parent, or to all processes, end only the program itself."""
    still_works(bubblewrap)
    server = bubblewrap._servers[0]
    for number in (9, 15, 19, 11):
        bubblewrap.run(Program(f"import os\nos.kill(os.getppid(), {number})\nos.kill(1, {number})"))
        bubblewrap.run(Program(f"import os\nos.kill(-1, {number})"))
    assert still_works(bubblewrap)
    assert bubblewrap._servers[0] is server


def test_server_cannot_be_traced_or_read(bubblewrap: Sandbox) -> None:
    """Contract: no tracing of processes of the same user (PTRACE_ATTACH 16) and no reading of their memory."""
    trace = "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0): raise OSError\nreturn 'attached'"
    assert attempted(bubblewrap, trace).startswith("prevented")
    assert attempted(bubblewrap, "return open('/proc/1/mem', 'rb').read(1)").startswith("prevented")


def test_output_is_bounded(sandbox: Sandbox) -> None:
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
    "loop",
    [
        "while True: pass",
        "sum(iter(int, 1))",
        "try:\n    while True: pass\nexcept BaseException: pass",
        "exec('while True: pass')",
        "import sys\nsys._getframe().f_trace = None\nwhile True: pass",
        "def run():\n    while True: pass\nimport threading\nt = threading.Thread(target=run)\nt.start()\nt.join()",
    ],
)
def test_endless_loop_is_stopped(sandbox: Sandbox, loop: str) -> None:
    """Contract: also if the loop's steps are not counted."""
    assert sandbox.run(Program(loop)).status == "timeout"


def test_leftover_process_is_killed(sandbox: Sandbox) -> None:
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
