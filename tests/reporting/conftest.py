from __future__ import annotations

from pathlib import Path

import pytest
from reporting_run import make_run

from stages.params import Params


@pytest.fixture(scope="session")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Params]:
    """(root, parameters) of a run with every file; do not modify it."""
    root = tmp_path_factory.mktemp("run")
    return root, make_run(root)
