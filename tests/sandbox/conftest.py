"""A sandbox of each back end that works on this machine; tests of the others are skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from stages.sandbox import Sandbox, SandboxSettings
from stages.sandbox.backends import SAFE
from stages.sandbox.probe import fault

LIMITS = {"steps": 100_000, "cpu_seconds": 1, "wall_seconds": 20.0, "memory_mb": 128, "processes": 4, "scratch_mb": 4}


def open_or_skip(backend: str, **limits: object) -> Sandbox:
    if reason := fault(backend):
        pytest.skip(f"{backend}: {reason}")
    return Sandbox(SandboxSettings(backend=backend, **{**LIMITS, **limits}))


def first_working() -> str:
    """The first back end that works here; the first one if none does."""
    return next((name for name in SAFE if fault(name) is None), SAFE[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`sandbox` is one of each back end; those that a machine with a better one does not use are slow."""
    if "sandbox" in metafunc.fixturenames:
        used = first_working()
        names = [name if name == used else pytest.param(name, marks=pytest.mark.slow) for name in SAFE]
        metafunc.parametrize("sandbox", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One sandbox for all tests of a file, which also shows that no program affects a later one."""
    sandbox = open_or_skip(request.param)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def any_sandbox() -> Iterator[Sandbox]:
    """A sandbox of the first back end that works, for tests that do not depend on the back end."""
    sandbox = open_or_skip(first_working())
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def bubblewrap() -> Iterator[Sandbox]:
    sandbox = open_or_skip("bubblewrap")
    yield sandbox
    sandbox.close()


@pytest.fixture
def open_sandbox() -> Iterator[Callable[..., Sandbox]]:
    """A function (back end, limits) -> sandbox."""
    made: list[Sandbox] = []

    def make(backend: str, **limits: object) -> Sandbox:
        made.append(open_or_skip(backend, **limits))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()
