from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout, export


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Path:
    """The working tree as it was when the tests began."""
    return export(tmp_path_factory.mktemp("lifecycle") / "source", tiny_policy)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Checkout:
    """A whole run from a clean checkout, tracked in MLflow. Copy it before you change anything."""
    checkout = Checkout.make(tmp_path_factory.mktemp("lifecycle") / "undisturbed", source, PYTHONHASHSEED="0")
    checkout.environment["BELLWETHER_TRACKING"] = "on"
    ran, restored = checkout.repro()
    assert len(ran) == 12
    assert not restored
    checkout.environment["BELLWETHER_TRACKING"] = "off"
    checkout.wait_for_tracking()
    return checkout


@pytest.fixture
def done(undisturbed: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the whole run, to be edited."""
    return undisturbed.copy(tmp_path / "copy")
