"""The code base keeps to its limits; `python -m tests.house` prints the numbers."""

from __future__ import annotations

import pytest

from tests import house

NUMBERS = house.measured()


@pytest.mark.parametrize("key", [key for key in NUMBERS if " over " in key or key.startswith("circles")])
def test_nothing_exceeds_a_limit(key: str) -> None:
    assert not NUMBERS[key]


def test_sizes_are_within_limits() -> None:
    assert float(str(NUMBERS["median"])) <= house.MEDIAN
    assert house.lines(house.Path("README.md")) <= house.README


def test_an_extension_is_a_module_and_its_entry_point() -> None:
    """Contract: a new environment, method or merge method changes no file of the core."""
    for kind, files in house.touched().items():
        assert len(files) <= 2, f"{kind}: {files}"
