"""Progress as a bar, as lines and in a file: counts, rate and time left, with and without work restored from a checkpoint."""

from __future__ import annotations

import json
import sys

import pytest

from stages.runtime import progress as module
from stages.runtime.progress import progress


@pytest.fixture
def clock(monkeypatch):
    """The module's clock: a list of one number, in seconds."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_printed_every_few_seconds_and_at_the_end(clock, capsys):
    with progress("sft: training", 40) as bar:
        for _ in range(40):
            clock[0] += 1.0
            bar.advance(1, "loss 2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sft: training 10/40 steps, 1 steps/s, 30 s left; loss 2"
    assert len(lines) == 4
    assert lines[-1].startswith("sft: training 40/40 steps")


def test_restored_work_counts_as_done_but_not_in_the_rate(clock, capsys):
    with progress("rl@search: training", 40) as bar:
        bar.restore(20)
        for _ in range(10):
            clock[0] += 2.0
            bar.advance()
    assert capsys.readouterr().out.splitlines()[-1] == "rl@search: training 30/40 steps, 0.5 steps/s, 20 s left"


def test_fully_restored_work_prints_one_line(capsys):
    with progress("evaluate: playing", 3, "episode") as bar:
        bar.restore(3)
    assert capsys.readouterr().out == "evaluate: playing 3/3 episodes; from a checkpoint\n"


def test_work_of_this_run_is_not_called_a_checkpoint(capsys):
    with progress("rollout@search: playing", 3, "episode", origin="") as bar:
        bar.restore(3)
    assert capsys.readouterr().out == "rollout@search: playing 3/3 episodes\n"


def test_terminal_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with progress("annotate: growing", 4, "tree") as bar:
        bar.restore(2)
        bar.advance(2, "9 nodes")
        assert bar.done == 4
        assert bar.bar.tasks[0].completed == 4
    assert "9 nodes" in bar.bar.tasks[0].fields["note"]


def test_progress_file_is_updated_and_removed_at_the_end(clock, tmp_path):
    """The Prefect flow reads this file of another process; it is written at most once a second."""
    file = tmp_path / "progress" / "rl@search.json"
    with progress("rl@search: training", 40, file=file) as bar:
        assert json.loads(file.read_text()) == {"label": "rl@search: training", "done": 0, "total": 40, "unit": "step"}
        bar.restore(10)
        assert json.loads(file.read_text())["done"] == 0
        clock[0] += module.FILE_EVERY_S
        bar.advance()
        assert json.loads(file.read_text())["done"] == 11
    assert not list(file.parent.iterdir())


def test_unwritable_progress_file_is_not_fatal(tmp_path):
    (tmp_path / "progress").write_text("a file, where the folder should be")
    with progress("sft: training", 2, file=tmp_path / "progress" / "sft.json") as bar:
        bar.advance(2)
    assert bar.done == 2
