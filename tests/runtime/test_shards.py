"""Shards that run as processes of this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stages.params import ROOT
from stages.runtime.process import wait_supervised
from stages.runtime.shards import _processes


def test_shard_that_a_signal_ends_has_failed(tmp_path: Path) -> None:
    """Contract: a shard that is killed, e.g. for lack of memory, does not count as done."""
    kill = "import os, sys; os.kill(os.getpid(), 9) if '1/2' in sys.argv else None"
    assert _processes([sys.executable, "-c", kill], tmp_path, 2) == 128 + 9


def test_interrupted_stage_ends_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: Ctrl-C leaves no shard behind, also of a runner that needs longer to end than subprocess.run waits."""
    file = tmp_path / "runner"

    def interrupted(child: subprocess.Popen, timeout: float | None = None) -> int:
        monkeypatch.undo()
        while not (file.exists() and file.read_text().strip()):
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait_supervised(["bash", "-c", f"echo $$ > {file}; exec sleep 90"], cwd=ROOT)
    runner, deadline = int(file.read_text()), time.monotonic() + 20
    while psutil.pid_exists(runner):
        assert time.monotonic() < deadline, "the runner outlived the stage"
        time.sleep(0.05)
