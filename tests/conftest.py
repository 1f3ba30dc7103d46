"""Fixtures for every test: a tiny random policy, made once per session."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from tiny import make_tiny_policy

gc.disable()  # until all tests are collected
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread per process, as in the stages: the tests' processes share the cores, where threads that wait for each other are slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.fsync = lambda handle: None  # type: ignore[assignment]  # tests kill processes, not machines: nothing must reach the disk
# Shells start background jobs with SIGINT ignored, which children inherit; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: `make test-all` runs it"))
    if hasattr(config, "workerinput"):  # a pytest-xdist worker, which takes files in the order of their tests
        items.sort(key=_seconds, reverse=True)


def pytest_collection_finish() -> None:
    """Leave what is imported and collected, millions of objects that stay, out of later garbage collections."""
    gc.freeze()
    gc.enable()


def _seconds(item: pytest.Item) -> float:
    """Duration given by the file's mark `long`. The longest files start first, so that none runs alone at the end; those that
    would wait for the whole run that another file makes (tests/lifecycle) have none."""
    long = item.get_closest_marker("long")
    return float(long.args[0]) if long else 0.0


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder shared by all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory) -> Path:
    """Folder of a tiny random policy: Llama, 2 layers of 32, 4 heads over 2 key/value heads, byte-level BPE of about 400 tokens.
    Do not write to it."""
    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="session")
def empty_database(shared: Path) -> Path:
    """A new MLflow database, made by the first worker that needs it; creating one takes seconds, copying it does not."""
    from stages.runtime.files import locked
    from stages.tracking.server import create_database

    folder = shared / "database"
    with locked(shared / "database.lock", wait=True):
        if not folder.exists():
            part = shared / "database.part"
            part.mkdir(exist_ok=True)
            create_database(part / "mlflow.db", folder / "artifacts")
            part.rename(folder)
    return folder / "mlflow.db"
