"""`make lifecycle` runs stages and workers in parallel and writes the bytes of sequential stages with one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.mark.parametrize("workers", [1, 3])
def test_parallel_stages_and_workers_write_same_bytes(undisturbed: Checkout, source: Path, tmp_path: Path, workers: int) -> None:
    """Contract: `undisturbed` ran stages two at a time with two workers each."""
    checkout = Checkout.make(tmp_path / "run", source, PYTHONHASHSEED=str(workers))
    checkout.edit({"resources": {"workers": workers}})
    if workers == 1:
        assert len(checkout.repro()[0]) == 12
    else:
        checkout.side_by_side()
    ours, other = checkout.lock, undisturbed.lock
    assert sorted(ours) == sorted(other)
    assert {name: stage["outs"] for name, stage in ours.items() if name != "report"} == {
        name: stage["outs"] for name, stage in other.items() if name != "report"
    }
