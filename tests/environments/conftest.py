"""A sandbox for the environments whose programs run in one; without one on this machine, what needs it is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stages.sandbox import Sandbox, SandboxSettings
from stages.sandbox.backends import SAFE
from stages.sandbox.probe import fault


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    lacking = {name: fault(name) for name in SAFE}
    if all(lacking.values()):
        pytest.skip("no sandbox on this machine: " + "; ".join(f"{name}: {why}" for name, why in lacking.items()))
    opened = Sandbox(SandboxSettings(steps=20_000))
    yield opened
    opened.close()
