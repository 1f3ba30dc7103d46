"""Files of domains that are no longer listed are removed from the inputs of stages that join all domains."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.runtime.unlisted_domains import keep_only


def test_entries_of_unlisted_domains_are_removed_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Removing a domain from `domains` gives the same result as if it had never been listed."""
    for name in ("search", "search_hard", "chess", "search.partial"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for name in ("search.json", "search_history.csv", "search_hard.json", "chess_history.csv"):
        (tmp_path / "data" / name).write_text("1")
    keep_only(tmp_path, ["search"], ["data", "absent"])
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["search", "search.json", "search_history.csv"]
    assert "removed data/chess: not one of the domains search" in capsys.readouterr().out


def test_symlink_is_removed_but_not_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("1")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chess").symlink_to(target)
    keep_only(tmp_path, ["search"], ["data"])
    assert not (tmp_path / "data" / "chess").exists()
    assert (target / "file").exists()
