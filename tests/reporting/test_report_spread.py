"""The pipeline with several seeds: its table and file, by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.curation.panel import PanelMismatchError
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.evaluation.statistics import StatisticsError
from stages.params import Params
from stages.records.episode import write_table
from stages.reporting import spread
from stages.reporting.blocks import Table, Text
from stages.reporting.inputs import load_inputs
from stages.reporting.sections.outcome import spread_blocks

BLANK = {
    "reward": 0.0,
    "turns": 1,
    "tokens": 1,
    "accepted": 1.0,
    "cost": 0.0,
    "difficulty": 1.0,
    "stop_reason": "",
    "answer": None,
}
SOLVED = {
    "sft": [(1, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0)],
    "rl@search": [(1, 1, 1, 0), (1, 1, 1, 1), (1, 0, 1, 1)],
    "merged": [(1, 1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 0)],
    "merged_linear": [(1, 1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 0)],
}
"""Model -> per seed, tasks solved (both attempts)."""


def seed_file(folder: Path, seed: int, solved: Mapping[str, Any], panel: str = "p" * 16) -> Path:
    """Evaluation rows of one lifecycle: four tasks in clusters of two."""
    rows = [
        {
            **{"model": model, "domain": "search", "task_id": f"t{task}", "attempt": attempt, "cluster": f"c{task // 2}"},
            **{"panel": panel, "policy_hash": f"{model}-{seed}", "success": bool(success), "solution": None, **BLANK},
        }
        for model, seeds in solved.items()
        for task, success in enumerate(seeds[seed])
        for attempt in range(2)
    ]
    path = folder / f"{seed}.parquet"
    write_table(path, EVALUATION_SCHEMA, rows)
    return path


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return spread.gathered({seed: seed_file(tmp_path, seed, SOLVED) for seed in (0, 1, 2)})


def test_numbers_by_hand(rows: list[dict[str, Any]]) -> None:
    """sft solves 1, 2 and 1 of 4 tasks, the specialist 3, 4 and 3: +2 for each seed; merge and linear are equal."""
    found = spread.summary(rows)
    assert found["seeds"] == [0, 1, 2]
    assert found["panels"] == {"search": {"hash": "p" * 16, "tasks": 4, "clusters": 2}}
    sft = found["models"]["sft"]["search"]
    assert (sft["mean"], sft["lowest"], sft["highest"]) == (pytest.approx(1 / 3, abs=1e-6), 0.25, 0.5)
    assert sft["per_seed"] == [0.25, 0.5, 0.25]
    assert sft["low"] < 1 / 3 < sft["high"]
    differences = {(entry["a"], entry["b"]): entry for entry in found["differences"]}
    gain = differences["rl@search", "sft"]
    assert (gain["mean"], gain["per_seed"]) == (0.5, [0.5, 0.5, 0.5])
    same = differences["merged", "merged_linear"]
    assert (same["mean"], same["low"], same["high"], same["effect"]) == (0.0, None, None, "undecided"), "seeds do not vary"
    assert list(found["models"]) == ["sft", "rl@search", "merged", "merged_linear"]


def test_different_panels_and_missing_tasks_are_rejected(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    files = {0: seed_file(tmp_path, 0, SOLVED), 1: seed_file(tmp_path, 1, SOLVED, panel="q" * 16)}
    with pytest.raises(PanelMismatchError, match=r"seed 1: q{16}"):
        spread.gathered(files)
    with pytest.raises(StatisticsError, match="lack tasks"):
        spread.summary(rows[1:])


def test_command_stores_rows_and_prints_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: the stored rows give the same file and table without the runs."""
    (tmp_path / "reports").mkdir()
    monkeypatch.chdir(tmp_path)
    files = [f"{seed}={seed_file(tmp_path, seed, SOLVED)}" for seed in (0, 1, 2)]
    printed = []
    for arguments in (files, []):
        monkeypatch.setattr("sys.argv", ["spread", *arguments])
        assert spread.main() == 0
        printed.append((capsys.readouterr().out, (tmp_path / spread.FILE).read_text()))
    assert printed[0] == printed[1]
    assert "| search | rl@search − sft | +50.0 | +50.0 to +50.0 |" in printed[0][0]
    assert "| search | sft | 33.3 % | 25.0 to 50.0 |" in printed[0][0]
    assert "seed` 0, 1, 2" in printed[0][0]
    monkeypatch.setattr("sys.argv", ["spread", "0=none.parquet"])
    assert spread.main() == 1
    assert "none.parquet" in capsys.readouterr().err


def test_short_table_has_a_line_per_domain(rows: list[dict[str, Any]]) -> None:
    header, _, line, *_ = spread.short(spread.summary(rows)).splitlines()
    assert header == "|  | sft | specialist | merged | specialist − sft | merged − sft | merged − linear |"
    assert line.startswith("| search | 33.3 % (25.0 to 50.0) | 83.3 % (75.0 to 100.0) | 75.0 % (75.0 to 75.0) | +50.0 (")
    assert line.endswith("| +0.0 (–) |")
    partial = [row for row in rows if row["model"] == "sft"]
    assert spread.short(spread.summary(partial)).splitlines()[2].endswith("| – | – | – | – | – |")


def test_without_runs_the_table_says_how_to_make_them(tmp_path: Path) -> None:
    (text,) = spread.files(tmp_path).values()
    found = json.loads(text)
    assert spread.short(found) == spread.full(found) == spread.NOT_MEASURED
    assert "python -m flows.spread" in spread.NOT_MEASURED


def test_report_shows_the_table_over_seeds(full_run: tuple[Path, Params], rows: list[dict[str, Any]]) -> None:
    inputs = load_inputs(*full_run)
    assert spread_blocks(inputs) == []
    (note,) = spread_blocks(replace(inputs, spread=spread.summary([])))
    assert isinstance(note, Text)
    assert "python -m flows.spread runs" in note.text
    table, about = spread_blocks(replace(inputs, spread=spread.summary(rows)))
    assert isinstance(table, Table)
    assert "3 seeds" in table.title
    assert ["search", "merged − merged_linear", "+0.0", "+0.0 to +0.0", "–", "undecided"] in table.rows
    assert isinstance(about, Text)
