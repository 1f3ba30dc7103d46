"""Contract: a mutated params.yaml is refused with file and key, or every value is used as written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stages.params import ROOT

from . import params
from .suites import counted

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(40)]


def test_no_mutated_file_is_lost() -> None:
    tally = counted("params", 100)
    assert tally.lost == []
    assert tally.counts["refused"] > 50
    assert tally.counts["accepted"] > 10


@pytest.mark.slow
def test_no_mutated_file_is_lost_in_5000_cases() -> None:
    assert counted("params", 5000, seed=1).lost == []


@pytest.mark.slow
def test_command_refuses_invalid_files_without_traceback(tmp_path: Path) -> None:
    """The suite runs in its own process; the command behaves alike: exit code 2 and a message on standard error."""
    text = params.shipped()[0]
    for number, broken in enumerate(
        (b"\xff" + text, text.replace(b"\nseed: 0", b"\nseed: 1e400"), text + b"\nx: " + b"[" * 5000)
    ):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(broken)
        command = [sys.executable, "-m", "stages.params", "--file", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert path.name in done.stderr
        assert "Traceback" not in done.stderr
