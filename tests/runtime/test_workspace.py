"""Programs in a workspace: what they cost, and what a failing one leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.runtime.workspace import EvaluationWorkspace, RunFailedError

BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def test_a_program_costs_the_processor_seconds_of_it_and_its_children(tmp_path: Path) -> None:
    """Contract: waiting, or standing still beside other programs, costs nothing."""
    waits = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {BUSY!r}], check=True); time.sleep(2)"
    seconds = EvaluationWorkspace(tmp_path).python(["-c", waits], 1)
    assert 0.5 <= seconds < 2


def test_a_failing_program_is_reported_with_its_last_output(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"failed \(exit code 3\):\nlast words"):
        EvaluationWorkspace(tmp_path).python(["-c", "print('last words'); raise SystemExit(3)"], 1)
