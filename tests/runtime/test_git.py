"""Commands of git."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.runtime.git import GitError, git


def test_failures_name_command_folder_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(GitError, match=r"git rev-parse HEAD failed in .*not a git repository"):
        git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitError, match=r"git status failed in .*'git'"):
        git(tmp_path, "status")
