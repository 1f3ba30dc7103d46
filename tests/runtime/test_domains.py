"""What a domain that is no longer listed left behind is taken out of the joining stages' inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.runtime.domains import keep_only


def test_entries_of_other_domains_are_removed_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`domains` shortened in one line gives the same join as if the domain had never been there."""
    for name in ("search", "search_hard", "chess", "search.partial"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for name in ("search.json", "search_history.csv", "search_hard.json", "chess_history.csv"):
        (tmp_path / "data" / name).write_text("1")
    keep_only(tmp_path, ["search"], ["data", "absent"])
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["search", "search.json", "search_history.csv"]
    assert "removed data/chess: not one of the domains search" in capsys.readouterr().out


def test_a_link_is_removed_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("1")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chess").symlink_to(target)
    keep_only(tmp_path, ["search"], ["data"])
    assert not (tmp_path / "data" / "chess").exists()
    assert (target / "file").exists()
