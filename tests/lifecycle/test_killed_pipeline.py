"""A pipeline that is killed again and again ends in the same bytes as one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(60)]


@pytest.mark.parametrize("stage", ["sft", "rl@search"])
def test_a_stage_that_was_killed_goes_on_to_the_same_hashes(done: Checkout, stage: str) -> None:
    """kill -9 while a stage trains: started again it ends in the bytes of the one that was left in peace."""
    lock = done.lock
    again = ("--force", "--single-item", stage)
    done.repro_killed_in(stage, *again)
    assert done.repro(*again) == ([stage], [])
    assert done.lock == lock


@pytest.mark.slow
@pytest.mark.parametrize("stages", [("sft", "rl@search"), ("rollout@textworld", "annotate@search")])
def test_killed_in_long_stages_it_ends_with_the_same_hashes(
    request: pytest.FixtureRequest, tmp_path: Path, source: Path, stages: tuple[str, ...]
) -> None:
    """Two runs from clean checkouts give the same dvc.lock, byte for byte, under another hash seed, and also when one of them is
    killed with kill -9 in stages that train or play, and started again each time."""
    disturbed = Checkout.make(tmp_path / "disturbed", source, PYTHONHASHSEED="1")
    for stage in stages:
        disturbed.repro_killed_in(stage)
    disturbed.repro()
    # Asked for at last, since another worker makes it in the meantime.
    undisturbed: Checkout = request.getfixturevalue("undisturbed")
    assert (disturbed.root / "dvc.lock").read_bytes() == (undisturbed.root / "dvc.lock").read_bytes()
