"""Frozen panels and the refusal to compare different ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stages.agent.episode import write_tasks
from stages.curation.panel import (
    Panel,
    PanelMismatchError,
    make_panel,
    panel_hash,
    read_panel,
    require_same_hash,
    require_same_panel,
    write_panel,
)
from stages.environments.protocol import Task
from stages.environments.search import SearchDomain


@pytest.fixture
def panel(domain: SearchDomain, tasks: list[Task]) -> Panel:
    return make_panel("search", tasks, domain.settings.model_dump(mode="json"))


def test_a_panel_is_the_test_tasks_by_id(panel: Panel, tasks: list[Task]) -> None:
    ids = [task.task_id for task in panel.tasks]
    assert ids == sorted(task.task_id for task in tasks if task.split == "test")


def test_the_hash_names_the_tasks_whatever_their_order(panel: Panel) -> None:
    assert panel_hash(panel.tasks[::-1]) == panel.hash
    assert len(panel.hash) == 16
    assert int(panel.hash, 16) >= 0
    assert panel_hash(panel.tasks[1:]) != panel.hash
    first = replace(panel.tasks[0], spec={**panel.tasks[0].spec, "answer": "Nobody"})
    assert panel_hash((first, *panel.tasks[1:])) != panel.hash


def test_a_panel_written_and_read_is_the_same(panel: Panel, tasks: list[Task], tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.parquet", tasks)
    write_panel(tmp_path / "panel.json", panel)
    again = read_panel(tmp_path)
    assert again == panel
    require_same_panel(again, panel)
    write_tasks(tmp_path / "tasks.parquet", [task for task in tasks if task.task_id != panel.tasks[0].task_id])
    with pytest.raises(PanelMismatchError, match="run the curate stage again"):
        read_panel(tmp_path)


def test_different_panels_are_not_compared(panel: Panel) -> None:
    """A comparison across different panels is refused: other tasks, other settings, or another domain."""
    with pytest.raises(PanelMismatchError, match="different panels"):
        require_same_panel(panel, replace(panel, tasks=panel.tasks[1:]))
    with pytest.raises(PanelMismatchError, match="max_turns"):
        require_same_panel(panel, replace(panel, environment={**panel.environment, "max_turns": 50}))
    with pytest.raises(PanelMismatchError, match="different domains"):
        require_same_panel(panel, replace(panel, domain="textworld"))
    require_same_hash({"sft": panel.hash, "merged": panel.hash}, "search")
    with pytest.raises(PanelMismatchError, match="merged: 0000"):
        require_same_hash({"sft": panel.hash, "merged": "0000"}, "search")
