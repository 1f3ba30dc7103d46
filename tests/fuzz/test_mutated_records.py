"""Contract: a mutated raw record, game or problem becomes a task or a rejection that names its line, and affects no valid one."""

from __future__ import annotations

import pytest

from .suites import counted

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(30)]


def test_no_mutated_record_is_lost() -> None:
    assert counted("records", 40).lost == []


@pytest.mark.slow
def test_no_mutated_record_is_lost_in_2000_cases() -> None:
    assert counted("records", 2000, seed=1).lost == []
