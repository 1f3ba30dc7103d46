"""A pipeline that is killed several times writes the same bytes as an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout

pytestmark = [pytest.mark.timeout(900)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl@search"])
def test_resume_after_kill_writes_same_bytes(done: Checkout, stage: str) -> None:
    """kill -9 while the stage trains, with one worker where the undisturbed run had two."""
    lock = done.lock
    done.edit({"resources": {"workers": 1}})
    again = ("--force", "--single-item", stage)
    done.repro_killed_in(stage, *again)
    assert done.repro(*again) == ([stage], [])
    assert done.lock == lock


@pytest.mark.slow
@pytest.mark.parametrize("stages", [("sft", "rl@search"), ("rollout@textworld", "annotate@search")])
def test_pipeline_killed_in_several_stages_writes_same_lock_file(
    request: pytest.FixtureRequest, tmp_path: Path, source: Path, stages: tuple[str, ...]
) -> None:
    """Two runs from clean checkouts give the same dvc.lock, byte for byte, with different hash seeds, and also if one of them is
    killed in stages that train or play and restarted each time."""
    disturbed = Checkout.make(tmp_path / "disturbed", source, PYTHONHASHSEED="1")
    for stage in stages:
        disturbed.repro_killed_in(stage)
    disturbed.repro()
    # Requested last, since another worker may make it in the meantime.
    undisturbed: Checkout = request.getfixturevalue("undisturbed")
    assert (disturbed.root / "dvc.lock").read_bytes() == (undisturbed.root / "dvc.lock").read_bytes()
