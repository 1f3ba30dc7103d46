"""The supervised child: its exit code is passed on, and no descendant outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = [sys.executable, "-m", "flows.supervise"]


def gone(pid: int, within_s: float = 120.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def wait_for(path: Path, within_s: float = 120.0) -> int:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


def test_exit_code_is_passed_on() -> None:
    assert subprocess.run([*SUPERVISE, sys.executable, "-c", "raise SystemExit(7)"], cwd=ROOT, check=False).returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_grandchildren(number: signal.Signals, tmp_path: Path) -> None:
    """Cancelling a run ends its processes, including those that its command has started."""
    script = f"sleep 60 & echo $! > {tmp_path}/grandchild; wait"
    process = subprocess.Popen([*SUPERVISE, "bash", "-c", script], cwd=ROOT)
    grandchild = wait_for(tmp_path / "grandchild")
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert gone(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_CHILD_SUBREAPER, which only Linux has")
def test_signal_ends_processes_in_other_sessions(tmp_path: Path) -> None:
    """A Prefect worker starts each flow run in its own session, which ending the worker's process group would not reach."""
    script = f"setsid bash -c 'trap \"\" TERM; echo $$ > {tmp_path}/escaped; while true; do sleep 1; done' & sleep 60"
    process = subprocess.Popen([*SUPERVISE, "--grace", "0.5", "bash", "-c", script], cwd=ROOT)
    escaped = wait_for(tmp_path / "escaped")
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert gone(escaped)


SIGNALLED_AT_THE_START = """
import os, signal, subprocess, sys
from flows import supervise

start = subprocess.Popen

def started(*arguments, **options):
    child = start(*arguments, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    return child

subprocess.Popen = started
sys.exit(supervise.run(["sleep", "90"], 0.5))
"""


def test_signal_before_popen_returns_ends_the_child() -> None:
    """On a busy machine the child may be at work before Popen returns."""
    with subprocess.Popen([sys.executable, "-c", SIGNALLED_AT_THE_START], cwd=ROOT, stdout=subprocess.PIPE) as process:
        process.communicate(timeout=60)  # the child holds the pipe, too: returns when both have ended
        assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG, which only Linux has")
def test_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    """kill -9 of a flow leaves no stage behind."""
    script = f"sleep 60 & echo $! > {tmp_path}/grandchild; wait"
    code = f"import subprocess; subprocess.run({[*SUPERVISE, 'bash', '-c', script]!r}, cwd={str(ROOT)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code])
    grandchild = wait_for(tmp_path / "grandchild")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_CHILD_SUBREAPER, which only Linux has")
@pytest.mark.parametrize(("options", "end", "code"), [([], "kill -9 $$", 137), (["--sweep"], "exit 3", 3)])
def test_killed_or_swept_command_leaves_no_process(options: list[str], end: str, code: int, tmp_path: Path) -> None:
    """A worker that is killed, or gives up, leaves no flow run behind."""
    script = f"setsid sleep 60 & echo $! > {tmp_path}/left; {end}"
    done = subprocess.run([*SUPERVISE, *options, "bash", "-c", script], cwd=ROOT, check=False)
    assert done.returncode == code
    assert gone(int((tmp_path / "left").read_text()))


def test_background_process_finishes_after_a_normal_exit(tmp_path: Path) -> None:
    """A stage's follower reports the stage's end to MLflow after it."""
    script = f"setsid bash -c 'sleep 1; echo reported > {tmp_path}/reported' > /dev/null 2>&1 & exit 0"
    assert subprocess.run([*SUPERVISE, "bash", "-c", script], cwd=ROOT, check=False).returncode == 0
    deadline = time.monotonic() + 120
    while not (tmp_path / "reported").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
