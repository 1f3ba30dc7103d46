"""Contract: a stage that is killed at any moment, or whose `dvc repro` is, ends in the same bytes when it is started again."""

from __future__ import annotations

import random

import pytest
from checkout import Checkout

from tests.fuzz.kills import Ground, attempt
from tests.fuzz.outcomes import LOST

pytestmark = [pytest.mark.timeout(3600), pytest.mark.long(40)]


def kills(checkout: Checkout, stages: list[str], count: int) -> list[str]:
    """What was killed and came out otherwise."""
    ground, found = Ground(checkout, checkout.lock), []
    for number, stage in enumerate(stages):
        found += attempt(ground, stage, random.Random(f"random kills/{number}"), count)
    assert len(found) >= len(stages)
    return [f"{name}: {outcome.detail}" for name, outcome in found if outcome.kind == LOST]


def test_a_stage_killed_at_random_moments_ends_in_the_same_bytes(done: Checkout) -> None:
    assert kills(done, ["merge"], 2) == []


def test_a_lock_file_that_a_kill_cut_short_is_named_by_dvc_and_restored(done: Checkout) -> None:
    """Contract: DVC writes dvc.lock in place; cut short, it is refused by its name, and as committed it serves again."""
    ground, path = Ground(done, done.lock), done.root / "dvc.lock"
    whole = path.read_text()
    path.write_text(whole[: whole.index("per_domain") + 10])
    assert ground.cut_lock()
    assert path.read_text() == whole
    assert not ground.cut_lock()
    assert done.repro() == ([], [])


@pytest.mark.slow
def test_every_stage_killed_at_random_moments_ends_in_the_same_bytes(done: Checkout) -> None:
    assert kills(done, list(done.lock), 3) == []
