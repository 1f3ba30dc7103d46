"""Which parameters of a test run in `make test`; the others are marked slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test, of which only `quick` run without --slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
