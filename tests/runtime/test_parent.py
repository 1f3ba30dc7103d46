"""Processes end when their parent does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.params import ROOT
from stages.runtime.parent import _end_with

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and pidfd are Linux's")
STAGE = (
    "import os, time\n"
    "from stages.runtime.parent import die_with_parent; die_with_parent(); print(os.getpid(), flush=True); time.sleep(60)"
)
STARTER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def alive(process: Path) -> bool:
    """Whether the process of a /proc folder is running; the folder may vanish while it is read."""
    try:
        return "(zombie)" not in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("shell", "dvc"),
    [([], False), ([], True), (["sh", "-c", '"$0" "$@"; exit $?'], True)],
    ids=["by hand", "by DVC", "by DVC in a shell"],
)
def test_stage_ends_with_its_parent(shell: list[str], dvc: bool) -> None:
    environment = {"PYTHONPATH": str(ROOT), **({"DVC_STAGE": "rl"} if dvc else {})}
    command = [sys.executable, "-c", STARTER, *shell, sys.executable, "-c", STAGE]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        stage = Path("/proc") / starter.stdout.readline().strip()
        assert stage.exists()
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        deadline = time.monotonic() + 10
        while alive(stage):
            assert time.monotonic() < deadline, "the stage outlived its parent"
            time.sleep(0.01)


def test_stage_in_a_user_shell_outlives_the_shells_parent() -> None:
    """`nohup bash run.sh` continues after a logout: only shells that DVC starts are looked through."""
    command = [sys.executable, "-c", STARTER, "sh", "-c", '"$0" "$@"; exit $?', sys.executable, "-c", STAGE]
    with subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        stage = int(starter.stdout.readline())
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        time.sleep(0.3)
        assert alive(Path("/proc") / str(stage))
        subprocess.run(["kill", str(stage)], check=True)


def test_stage_whose_dvc_has_just_ended_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    _end_with(ended.pid)
    assert sent == [(os.getpid(), signal.SIGTERM)]
