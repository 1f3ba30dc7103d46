"""The code base stays within its limits; `python -m tests.code_metrics` prints the numbers."""

from __future__ import annotations

import pytest

from tests import code_metrics

NUMBERS = code_metrics.measured()


@pytest.mark.parametrize("key", [key for key in NUMBERS if " over " in key or "cycles" in key])
def test_no_oversized_code_and_no_import_cycles(key: str) -> None:
    assert not NUMBERS[key]


def test_sizes_are_within_limits() -> None:
    assert float(str(NUMBERS["median"])) <= code_metrics.MEDIAN
    assert code_metrics.lines(code_metrics.Path("README.md")) <= code_metrics.README


def test_extension_consists_of_at_most_two_files() -> None:
    """Contract: a new environment, method or merge method changes no file of the core."""
    for kind, files in code_metrics.touched().items():
        assert len(files) <= 2, f"{kind}: {files}"
