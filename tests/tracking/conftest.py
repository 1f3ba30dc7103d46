from __future__ import annotations

from pathlib import Path

import pytest

from stages.tracking.server import Server


@pytest.fixture
def root(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "DVC_ROOT", "LIFECYCLE_RUN_ID", "BELLWETHER_TRACKING"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mlflow.db").write_bytes(empty_database.read_bytes())
    return tmp_path


@pytest.fixture
def server(root: Path) -> Server:
    return Server(root)
