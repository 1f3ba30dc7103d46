"""Contract: a mutated file of curate.imports is read record by record, or refused by its name."""

from __future__ import annotations

import pytest

from .suites import counted

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(15)]


def test_no_mutated_import_is_lost() -> None:
    assert counted("imports", 150).lost == []


@pytest.mark.slow
def test_no_mutated_import_is_lost_in_2000_cases() -> None:
    assert counted("imports", 2000, seed=1).lost == []
