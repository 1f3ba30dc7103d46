"""Files of specifications for tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def spec_file(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, name: str = "mine.sexp") -> str:
    """Write a specification below `folder`, which becomes the working directory; returns what `constraint.spec` names it."""
    monkeypatch.chdir(folder)
    path = Path("data/raw") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path.as_posix()
