"""Shards that run as processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from stages.runtime.shards import _processes


def test_shard_that_a_signal_ends_has_failed(tmp_path: Path) -> None:
    """Contract: a shard that is killed, e.g. for lack of memory, does not count as done."""
    kill = "import os, sys; os.kill(os.getpid(), 9) if '1/2' in sys.argv else None"
    assert _processes([sys.executable, "-c", kill], tmp_path, 2) == 128 + 9
