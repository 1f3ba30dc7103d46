"""A sandbox of each back end that works on this machine; tests of the others are skipped, with what those lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from stages.sandbox import Sandbox, SandboxSettings
from stages.sandbox.backends import SAFE
from stages.sandbox.probe import fault

LIMITS = {"steps": 100_000, "cpu_seconds": 1, "wall_seconds": 20.0, "memory_mb": 128, "processes": 4, "scratch_mb": 4}


def opened(backend: str, **limits: object) -> Sandbox:
    if lacking := fault(backend):
        pytest.skip(f"{backend}: {lacking}")
    return Sandbox(SandboxSettings(backend=backend, **{**LIMITS, **limits}))


@pytest.fixture(scope="module", params=SAFE)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One for all tests of a file, so that they also show that none of them spoils the next one's."""
    sandbox = opened(request.param)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def working() -> Iterator[Sandbox]:
    """The first back end that works here, for what does not depend on which it is."""
    sandbox = opened(next((name for name in SAFE if fault(name) is None), SAFE[0]))
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def bubblewrap() -> Iterator[Sandbox]:
    sandbox = opened("bubblewrap")
    yield sandbox
    sandbox.close()


@pytest.fixture
def open_sandbox() -> Iterator[Callable[..., Sandbox]]:
    """Opens one with other limits: back end, limits -> sandbox."""
    made: list[Sandbox] = []

    def make(backend: str, **limits: object) -> Sandbox:
        made.append(opened(backend, **limits))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()
