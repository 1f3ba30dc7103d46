"""A sandbox for environments that run programs; their tests are skipped if none is available."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stages.sandbox import Sandbox, SandboxSettings
from stages.sandbox.backends import SAFE
from stages.sandbox.probe import fault


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    unavailable = {name: fault(name) for name in SAFE}
    if all(unavailable.values()):
        pytest.skip("no sandbox on this machine: " + "; ".join(f"{name}: {why}" for name, why in unavailable.items()))
    opened = Sandbox(SandboxSettings(steps=20_000))
    yield opened
    opened.close()
