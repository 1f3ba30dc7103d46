"""Contract: a params.yaml with other values, keys or bytes is refused in words that name file and key, or means what it says."""

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
    tally = counted("params", 500)
    assert tally.lost == []
    assert tally.counts["refused"] > 250
    assert tally.counts["accepted"] > 50


@pytest.mark.slow
def test_no_mutated_file_of_many_is_lost() -> None:
    assert counted("params", 5000, seed=1).lost == []


def test_the_command_refuses_as_the_suite_has_it(tmp_path: Path) -> None:
    """What the suite does in its own process is what the command does: exit code 2, words on standard error, no traceback."""
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
