"""What counts as a change of the inputs, and when it starts a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.watch import Watch, hashes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "raw" / "search.jsonl").write_text("{}\n")
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    return tmp_path


def watched(root: Path) -> tuple[Watch, list[str]]:
    started: list[str] = []
    return Watch(root, started.append), started


def looks(watch: Watch, count: int = 3) -> None:
    for _ in range(count):
        watch.poll()


def test_the_first_look_starts_nothing_and_a_change_starts_one_run(root: Path) -> None:
    watch, started = watched(root)
    looks(watch)
    assert started == []
    (root / "params.yaml").write_text("seed: 1  # edited\n")
    looks(watch)
    assert len(started) == 1
    assert started[0].startswith("params.yaml changed (")
    (root / "data" / "raw" / "maze.jsonl").write_text("{}\n")
    looks(watch)
    assert [reason.split(" ")[0] for reason in started] == ["params.yaml", "data/raw"]


def test_a_file_that_is_still_being_written_is_left_alone(root: Path) -> None:
    watch, started = watched(root)
    looks(watch)
    for size in range(1, 5):
        (root / "params.yaml").write_text("seed: 1\n" * size)
        watch.poll()
        assert started == []
    watch.poll()
    assert len(started) == 1


def test_new_times_on_the_same_bytes_are_no_change(root: Path) -> None:
    """git checkout and touch give files new times."""
    watch, started = watched(root)
    looks(watch)
    (root / "params.yaml").write_bytes((root / "params.yaml").read_bytes())
    (root / "elsewhere.txt").write_text("not watched")
    looks(watch)
    assert started == []


def test_a_change_made_while_nobody_watched_is_seen(root: Path) -> None:
    looks(watched(root)[0])
    (root / "params.yaml").write_text("seed: 2\n")
    watch, started = watched(root)
    looks(watch)
    assert len(started) == 1


def test_a_run_that_could_not_be_started_is_started_later(root: Path) -> None:
    """A server that is away loses no change."""
    away, started = [True], []

    def start(reason: str) -> None:
        if away[0]:
            raise ConnectionError("no server")
        started.append(reason)

    watch = Watch(root, start)
    looks(watch)
    (root / "params.yaml").write_text("seed: 3\n")
    watch.poll()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            watch.poll()
    away[0] = False
    looks(watch)
    assert len(started) == 1


def test_removing_a_file_changes_the_hash_of_its_folder_alone(root: Path) -> None:
    before = hashes(root)
    (root / "data" / "raw" / "search.jsonl").unlink()
    after = hashes(root)
    assert after["params.yaml"] == before["params.yaml"]
    assert after["data/raw"] != before["data/raw"]
