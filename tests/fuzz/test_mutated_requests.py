"""Contract: a mutated request is answered or refused with status 4xx in OpenAI's format, and the next valid one is answered as
before."""

from __future__ import annotations

import pytest

from .suites import counted

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(20)]


def test_no_mutated_request_is_lost() -> None:
    assert counted("requests", 75).lost == []


@pytest.mark.slow
def test_no_mutated_request_is_lost_in_2000_cases() -> None:
    assert counted("requests", 2000, seed=1).lost == []
