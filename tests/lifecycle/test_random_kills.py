"""Contract: a stage that is killed at any moment, or whose `dvc repro` is, writes the same bytes after a restart."""

from __future__ import annotations

import random

import pytest
from checkout import Checkout

from tests.fuzz.kills import FinishedRun, attempt
from tests.fuzz.outcomes import LOST

pytestmark = [pytest.mark.timeout(3600)]


def kills(checkout: Checkout, stages: list[str], count: int) -> list[str]:
    """The kills after which the result differs."""
    finished_run, found = FinishedRun(checkout, checkout.lock), []
    for number, stage in enumerate(stages):
        found += attempt(finished_run, stage, random.Random(f"random kills/{number}"), count)
    assert len(found) >= len(stages)
    return [f"{name}: {outcome.detail}" for name, outcome in found if outcome.kind == LOST]


@pytest.mark.slow
def test_merge_killed_at_random_moments_writes_same_bytes(done: Checkout) -> None:
    assert kills(done, ["merge"], 1) == []


@pytest.mark.slow
def test_truncated_lock_file_is_named_by_dvc_and_can_be_restored(done: Checkout) -> None:
    """Contract: DVC writes dvc.lock in place; it names a truncated one, and works again with the committed one."""
    finished_run, path = FinishedRun(done, done.lock), done.root / "dvc.lock"
    whole = path.read_text()
    path.write_text(whole[: whole.index("per_domain") + 10])
    assert finished_run.restore_truncated_lock()
    assert path.read_text() == whole
    assert not finished_run.restore_truncated_lock()
    assert done.repro() == ([], [])


@pytest.mark.slow
def test_every_stage_killed_at_random_moments_writes_same_bytes(done: Checkout) -> None:
    assert kills(done, list(done.lock), 3) == []
