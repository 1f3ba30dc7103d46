"""The supervised child: exit codes pass through, and nothing outlives it."""

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


def test_the_commands_exit_code_is_passed_on() -> None:
    assert subprocess.run([*SUPERVISE, sys.executable, "-c", "raise SystemExit(7)"], cwd=ROOT, check=False).returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_ends_grandchildren_too(number: signal.Signals, tmp_path: Path) -> None:
    """Cancelling a run ends its processes, those its command has started as well."""
    script = f"sleep 60 & echo $! > {tmp_path}/grandchild; wait"
    process = subprocess.Popen([*SUPERVISE, "bash", "-c", script], cwd=ROOT)
    grandchild = wait_for(tmp_path / "grandchild")
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert gone(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="takes in orphans, which Linux alone offers")
def test_what_left_for_a_session_of_its_own_is_ended_too(tmp_path: Path) -> None:
    """A Prefect worker starts each flow run in a session of its own: ending the worker's group would not reach them."""
    script = f"setsid bash -c 'trap \"\" TERM; echo $$ > {tmp_path}/escaped; while true; do sleep 1; done' & sleep 60"
    process = subprocess.Popen([*SUPERVISE, "--grace", "0.5", "bash", "-c", script], cwd=ROOT)
    escaped = wait_for(tmp_path / "escaped")
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert gone(escaped)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for a signal when the parent dies, which Linux alone offers")
def test_when_its_parent_is_killed_nothing_is_left(tmp_path: Path) -> None:
    """kill -9 of a flow leaves no stage behind."""
    script = f"sleep 60 & echo $! > {tmp_path}/grandchild; wait"
    code = f"import subprocess; subprocess.run({[*SUPERVISE, 'bash', '-c', script]!r}, cwd={str(ROOT)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code])
    grandchild = wait_for(tmp_path / "grandchild")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="takes in orphans, which Linux alone offers")
@pytest.mark.parametrize(("options", "end", "code"), [([], "kill -9 $$", 137), (["--sweep"], "exit 3", 3)])
def test_what_a_command_leaves_is_ended_with_it(options: list[str], end: str, code: int, tmp_path: Path) -> None:
    """A worker that is killed leaves no flow run at work, and neither does one that gives up."""
    script = f"setsid sleep 60 & echo $! > {tmp_path}/left; {end}"
    done = subprocess.run([*SUPERVISE, *options, "bash", "-c", script], cwd=ROOT, check=False)
    assert done.returncode == code
    assert gone(int((tmp_path / "left").read_text()))


def test_what_outlives_a_command_that_ends_by_itself_is_left_to_finish(tmp_path: Path) -> None:
    """A stage's follower tells MLflow of the stage's end after it."""
    script = f"setsid bash -c 'sleep 1; echo told > {tmp_path}/told' > /dev/null 2>&1 & exit 0"
    assert subprocess.run([*SUPERVISE, "bash", "-c", script], cwd=ROOT, check=False).returncode == 0
    deadline = time.monotonic() + 120
    while not (tmp_path / "told").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
