"""What tests of stages' runs share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stages.runtime import stage as runtime


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text("domains: [search]\nper_domain: {search: {}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLWETHER_TRACKING", "off")
    monkeypatch.delenv("BELLWETHER_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["stage"])
    monkeypatch.setattr(runtime, "die_with_parent", lambda: None)
    return tmp_path
