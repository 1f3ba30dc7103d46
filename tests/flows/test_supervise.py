"""The supervised child: its exit code is passed on, and no descendant outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.runtime.process import wait_supervised

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_grandchildren(number: signal.Signals, tmp_path: Path) -> None:
    """Cancelling a run, or closing its terminal, ends its processes, including those that its command has started."""
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


TWO_SIGNALS = """
import os, signal, subprocess, sys
from flows import supervise

start = subprocess.Popen
both = (signal.SIGINT, signal.SIGTERM)

def started(*arguments, **options):
    child = start(*arguments, **options)
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    return child

subprocess.Popen = started
sys.exit(supervise.run(["sleep", "90"], 0.5))
"""


def test_second_signal_does_not_save_the_child() -> None:
    """Ctrl-C reaches the flow and its supervisor, which the flow then also terminates; on a busy machine it gets both at once."""
    with subprocess.Popen([sys.executable, "-c", TWO_SIGNALS], cwd=ROOT, stdout=subprocess.PIPE) as process:
        process.communicate(timeout=60)  # the child holds the pipe, too
        assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_hangup_that_is_ignored_stays_ignored() -> None:
    command = ["nohup", *SUPERVISE, "sh", "-c", "kill -HUP $PPID; exit 4"]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 4


KILLED_AT_THE_START = """
import os, signal, subprocess, sys
from pathlib import Path
from flows.process import run_supervised

start = subprocess.Popen

def started(*arguments, **options):
    print(start(*arguments, **options).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = started
run_supervised(["-c", f"open({sys.argv[1]!r}, 'w')"], Path.cwd(), os.environ, print)
"""


def test_supervisor_of_a_dead_parent_starts_nothing(tmp_path: Path) -> None:
    """A flow that is killed while its supervisor still loads Python leaves no stage behind."""
    killed = [sys.executable, "-c", KILLED_AT_THE_START, str(tmp_path / "begun")]
    done = subprocess.run(killed, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout))
    assert not (tmp_path / "begun").exists()


def test_timeout_ends_what_a_supervisor_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """subprocess.run would kill the supervisor alone."""

    def late(child: subprocess.Popen, timeout: float | None = None) -> int:
        monkeypatch.undo()
        wait_for(tmp_path / "child")
        raise subprocess.TimeoutExpired(child.args, 1.0)

    monkeypatch.setattr(subprocess.Popen, "wait", late)
    with pytest.raises(subprocess.TimeoutExpired):
        wait_supervised(["bash", "-c", f"echo $$ > {tmp_path}/child; exec sleep 90"], 1.0, cwd=ROOT)
    assert gone(wait_for(tmp_path / "child"), 10.0)


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
