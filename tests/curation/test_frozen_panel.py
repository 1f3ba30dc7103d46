"""Frozen panels: hashes, changed inputs, and comparisons across panels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stages.curation.panel import (
    Panel,
    PanelMismatchError,
    make_panel,
    read_panel,
    require_same_hash,
    write_panel,
)
from stages.environments.search import SearchDomain, SearchSettings
from stages.records.episode import read_json, write_json, write_tasks
from stages.records.task import Task


@pytest.fixture
def panel(domain: SearchDomain, tasks: list[Task], tmp_path: Path) -> Panel:
    return make_panel(domain, tasks, tmp_path / "worlds")


def test_panel_has_the_test_tasks_sorted_by_id(panel: Panel, tasks: list[Task]) -> None:
    ids = [task.task_id for task in panel.tasks]
    assert ids == sorted(task.task_id for task in tasks if task.split == "test")


def test_hash_covers_tasks_in_any_order(panel: Panel) -> None:
    assert replace(panel, tasks=panel.tasks[::-1]).hash == panel.hash
    assert len(panel.hash) == 16
    assert int(panel.hash, 16) >= 0
    assert replace(panel, tasks=panel.tasks[1:]).hash != panel.hash
    first = replace(panel.tasks[0], spec={**panel.tasks[0].spec, "answer": "Nobody"})
    assert replace(panel, tasks=(first, *panel.tasks[1:])).hash != panel.hash


def test_hash_covers_environment_settings(panel: Panel, tasks: list[Task], tmp_path: Path) -> None:
    """Contract: the same tasks under other environment settings are another panel."""
    longer = SearchDomain(SearchSettings(max_turns=50))
    assert make_panel(longer, tasks, tmp_path / "worlds").hash != panel.hash


def test_hash_covers_worlds_of_test_tasks(domain: SearchDomain, panel: Panel, tasks: list[Task], tmp_path: Path) -> None:
    """Contract: a changed byte in a test task's world makes another panel; worlds of training tasks do not count."""
    worlds = tmp_path / "worlds"
    assert set(panel.worlds) == {f"{task.spec['world']}.json" for task in panel.tasks}
    (worlds / f"{next(task for task in tasks if task.split == 'train').spec['world']}.json").write_text("{}")
    assert make_panel(domain, tasks, worlds) == panel
    with (worlds / next(iter(panel.worlds))).open("a") as file:
        file.write(" ")
    assert make_panel(domain, tasks, worlds).hash != panel.hash


def test_without_world_files_every_file_counts(panel: Panel, tasks: list[Task], tmp_path: Path) -> None:
    """Contract: a domain without `world_files` is hashed with all files that it built, wherever they are."""

    class WithoutWorldFiles(SearchDomain):
        world_files = None  # type: ignore[assignment]

    before = make_panel(WithoutWorldFiles(), tasks, tmp_path / "worlds")
    assert len(before.worlds) == len(list((tmp_path / "worlds").iterdir())) > len(panel.worlds)
    assert make_panel(WithoutWorldFiles(), tasks, (tmp_path / "worlds").rename(tmp_path / "moved")) == before


def test_panel_round_trips_and_rejects_missing_tasks(panel: Panel, tasks: list[Task], tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.parquet", tasks)
    write_panel(tmp_path / "panel.json", panel)
    again = read_panel(tmp_path)
    assert again == panel
    assert again.hash == panel.hash
    write_tasks(tmp_path / "tasks.parquet", [task for task in tasks if task.task_id != panel.tasks[0].task_id])
    with pytest.raises(PanelMismatchError, match="run the curate stage again"):
        read_panel(tmp_path)


def test_changed_or_missing_worlds_and_settings_are_rejected(panel: Panel, tasks: list[Task], tmp_path: Path) -> None:
    """Contract: tasks, settings and worlds are those that panel.json was frozen with, or the error says what differs."""
    write_tasks(tmp_path / "tasks.parquet", tasks)
    write_panel(tmp_path / "panel.json", replace(panel, environment={**panel.environment, "max_turns": 50}))
    frozen = read_json(tmp_path / "panel.json")
    write_json(tmp_path / "panel.json", {**frozen, "environment": panel.environment})
    with pytest.raises(PanelMismatchError, match="test tasks and settings hash to"):
        read_panel(tmp_path)
    write_panel(tmp_path / "panel.json", panel)
    first, second, *_ = sorted(panel.worlds)
    (tmp_path / "worlds" / first).write_text("{}")
    (tmp_path / "worlds" / second).unlink()
    with pytest.raises(PanelMismatchError, match=f"{first}, {second} missing or changed since panel.json was frozen; run"):
        read_panel(tmp_path)


def test_comparing_different_panels_is_rejected(panel: Panel) -> None:
    require_same_hash({"sft": panel.hash, "merged": panel.hash}, "search")
    with pytest.raises(PanelMismatchError, match="merged: 0000"):
        require_same_hash({"sft": panel.hash, "merged": "0000"}, "search")
