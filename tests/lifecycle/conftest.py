from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkout import Checkout, export

from stages.runtime.files import locked


@pytest.fixture(scope="session")
def source(shared: Path, tiny_policy: Path) -> Path:
    """The working tree at the start of the tests."""
    folder = shared / "source"
    with locked(shared / "source.lock", wait=True):
        if not folder.exists():
            export(shared / "source.part", tiny_policy).rename(folder)
    return folder


@pytest.fixture(scope="session")
def undisturbed(shared: Path, source: Path) -> Checkout:
    """A whole run from a clean checkout, tracked in MLflow, made by the first worker that needs it: two stages at a time, each
    with two workers. Copy it before you change anything."""
    root, made = shared / "undisturbed", shared / "undisturbed.made"
    with locked(shared / "undisturbed.lock", wait=True):
        if not made.exists():
            shutil.rmtree(root, ignore_errors=True)  # left by a worker that failed
            checkout = Checkout.make(root, source, PYTHONHASHSEED="0", BELLWETHER_TRACKING="on")
            checkout.side_by_side()
            checkout.wait_for_tracking()
            made.touch()
    return Checkout(root, {"PYTHONHASHSEED": "0", "BELLWETHER_TRACKING": "off"})


@pytest.fixture
def done(undisturbed: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the whole run that a test may change."""
    return undisturbed.copy(tmp_path / "copy")


@pytest.fixture(scope="module")
def original(base: Checkout) -> str:
    """params.yaml of `base`, a checkout that a module shares between its tests."""
    return (base.root / "params.yaml").read_text()


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """Stage -> the settings that its outputs in `base` are of: tests that agree in them share the outputs."""
    return {}
