"""`make lifecycle` runs stages and workers in parallel and writes the bytes of sequential stages with one worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkout import Checkout

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(90)]


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_parallel_stages_and_workers_write_same_bytes(undisturbed: Checkout, source: Path, tmp_path: Path, workers: int) -> None:
    """Contract: `undisturbed` ran one stage after the other with one worker each."""
    checkout = Checkout.make(tmp_path / "run", source, PYTHONHASHSEED=str(workers))
    checkout.edit({"resources": {"workers": workers}})
    command = [sys.executable, "-m", "flows.pipeline", "--jobs", "2"]
    done = subprocess.run(command, cwd=checkout.root, env=checkout.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "lifecycle: 12 stages to run, 2 at a time" in done.stdout
    ours, alone = checkout.lock, undisturbed.lock
    assert sorted(ours) == sorted(alone)
    assert {name: stage["outs"] for name, stage in ours.items() if name != "report"} == {
        name: stage["outs"] for name, stage in alone.items() if name != "report"
    }
