"""The code base stays within its limits; `python -m tests.code_metrics` prints the numbers."""

from __future__ import annotations

import pytest

from tests import code_metrics


@pytest.fixture(scope="module")
def numbers() -> dict[str, object]:
    return code_metrics.measured()


def test_no_oversized_code_and_no_import_cycles(numbers: dict[str, object]) -> None:
    limited = {key: value for key, value in numbers.items() if " over " in key or "cycles" in key}
    assert len(limited) == 4
    assert not any(limited.values()), limited


def test_sizes_are_within_limits(numbers: dict[str, object]) -> None:
    assert float(str(numbers["median"])) <= code_metrics.MEDIAN
    assert code_metrics.lines(code_metrics.Path("README.md")) <= code_metrics.README


def test_extension_consists_of_at_most_two_files() -> None:
    """Contract: a new environment, method or merge method changes no file of the core."""
    for kind, files in code_metrics.touched().items():
        assert len(files) <= 2, f"{kind}: {files}"
