"""Options of the quick mode: sizes that only check that a scenario works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import trl_side
from benchmarks.measure import Options

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    torch.set_num_threads(1)  # as the processes that a layout starts, whose sums are compared with this one's bit for bit
    return Options(ROOT, tmp_path_factory.mktemp("benchmarks"), quick=True, threads=1)


@pytest.fixture(scope="session")
def _with_trl() -> None:
    if reason := trl_side.available():
        pytest.skip(reason)
