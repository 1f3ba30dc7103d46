"""Tasks of the domain that a file tests, and a sandbox for programs, whose tests are skipped if none is available."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.environments.base_domain import RecipeDomain
from stages.records.task import Task
from stages.sandbox import Sandbox, SandboxSettings
from stages.sandbox.backends import SAFE
from stages.sandbox.probe import fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For worlds of `tasks`."""
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def tasks(domain: RecipeDomain, folder: Path) -> list[Task]:
    """104 tasks of the file's `domain`."""
    return domain.build(list(domain.recipes(104, 3)), folder, 1)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    unavailable = {name: fault(name) for name in SAFE}
    if all(unavailable.values()):
        pytest.skip("no sandbox on this machine: " + "; ".join(f"{name}: {why}" for name, why in unavailable.items()))
    opened = Sandbox(SandboxSettings(steps=20_000))
    yield opened
    opened.close()
