from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Checkout:
    """A whole run from a clean checkout, tracked in MLflow. Copy it before you change anything."""
    checkout = Checkout.make(tmp_path_factory.mktemp("lifecycle") / "undisturbed", tiny_policy, PYTHONHASHSEED="0")
    checkout.environment["BELLWETHER_TRACKING"] = "on"
    ran, restored = checkout.repro()
    assert len(ran) == 12
    assert not restored
    checkout.environment["BELLWETHER_TRACKING"] = "off"
    return checkout


@pytest.fixture
def done(undisturbed: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the whole run, to be edited."""
    return undisturbed.copy(tmp_path / "copy")
