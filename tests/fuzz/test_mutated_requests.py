"""Contract: a request with other values, keys, bytes or headers is answered in OpenAI's shape or refused in it with a status 4xx,
and the next good one is answered as before."""

from __future__ import annotations

import pytest

from .suites import counted

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(20)]


def test_no_mutated_request_is_lost() -> None:
    assert counted("requests", 150).lost == []


@pytest.mark.slow
def test_no_mutated_request_of_many_is_lost() -> None:
    assert counted("requests", 2000, seed=1).lost == []
