"""Which changes of the inputs start a run, and when."""

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


def poll(watch: Watch, count: int = 3) -> None:
    for _ in range(count):
        watch.poll()


def test_change_starts_one_run_and_the_first_poll_none(root: Path) -> None:
    watch, started = watched(root)
    poll(watch)
    assert started == []
    (root / "params.yaml").write_text("seed: 1  # edited\n")
    poll(watch)
    assert len(started) == 1
    assert started[0].startswith("params.yaml changed (")
    (root / "data" / "raw" / "maze.jsonl").write_text("{}\n")
    poll(watch)
    assert [reason.split(" ")[0] for reason in started] == ["params.yaml", "data/raw"]


def test_file_still_being_written_starts_no_run(root: Path) -> None:
    watch, started = watched(root)
    poll(watch)
    for size in range(1, 5):
        (root / "params.yaml").write_text("seed: 1\n" * size)
        watch.poll()
        assert started == []
    watch.poll()
    assert len(started) == 1


def test_new_times_on_the_same_bytes_start_no_run(root: Path) -> None:
    """git checkout and touch change a file's times."""
    watch, started = watched(root)
    poll(watch)
    (root / "params.yaml").write_bytes((root / "params.yaml").read_bytes())
    (root / "elsewhere.txt").write_text("not watched")
    poll(watch)
    assert started == []


def test_change_made_while_not_watching_starts_a_run(root: Path) -> None:
    poll(watched(root)[0])
    (root / "params.yaml").write_text("seed: 2\n")
    watch, started = watched(root)
    poll(watch)
    assert len(started) == 1


def test_failed_start_is_retried(root: Path) -> None:
    """An unreachable server loses no change."""
    unreachable, started = [True], []

    def start(reason: str) -> None:
        if unreachable[0]:
            raise ConnectionError("no server")
        started.append(reason)

    watch = Watch(root, start)
    poll(watch)
    (root / "params.yaml").write_text("seed: 3\n")
    watch.poll()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            watch.poll()
    unreachable[0] = False
    poll(watch)
    assert len(started) == 1


def test_removing_a_file_changes_only_the_hash_of_its_folder(root: Path) -> None:
    before = hashes(root)
    (root / "data" / "raw" / "search.jsonl").unlink()
    after = hashes(root)
    assert after["params.yaml"] == before["params.yaml"]
    assert after["data/raw"] != before["data/raw"]
