"""Duplicates, overlap between splits, length, and records that can't be built."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.curation.assemble import assemble
from stages.curation.cleaning import drop_duplicate_records, similarity, task_faults
from stages.curation.raw import RawRecord
from stages.environments.search import SearchDomain, SearchSettings
from stages.records.task import Task
from stages.runtime import spans
from stages.runtime.progress import Progress

REQUESTED = {"train": 8, "valid": 2, "test": 8}


def with_record(source: RawRecord, line: int, **changes: object) -> RawRecord:
    return RawRecord({**source.record, **changes}, source.file, line)


def test_duplicate_records_name_the_first_line(records: list[RawRecord]) -> None:
    again = with_record(records[0], 200)
    renamed = with_record(records[1], 201, task_id="other")
    kept, rejections = drop_duplicate_records([*records, again, renamed])
    assert kept == records
    assert [(r.line, r.reason) for r in rejections] == [(200, "duplicate_id"), (201, "duplicate")]
    assert "of line 1" in rejections[0].detail
    assert "of line 2" in rejections[1].detail


def test_clean_tasks_have_no_faults(domain: SearchDomain, tasks: list[Task]) -> None:
    assert task_faults(tasks, domain, 640) == {}


def test_train_tasks_sharing_entities_with_test_are_dropped(domain: SearchDomain, tasks: list[Task]) -> None:
    """Overlapping tasks are removed from training, never from test."""
    test = next(task for task in tasks if task.split == "test")
    train = next(task for task in tasks if task.split == "train")
    leaking = replace(train, spec={**train.spec, "start": test.spec["answer"]})
    faults = task_faults([leaking if task is train else task for task in tasks], domain, 640)
    assert list(faults) == [train.task_id]
    assert faults[train.task_id][0] == "split_overlap"
    assert test.spec["answer"] in faults[train.task_id][1]


def test_train_task_in_a_world_of_another_split_is_dropped(domain: SearchDomain, tasks: list[Task]) -> None:
    valid = next(task for task in tasks if task.split == "valid")
    train = next(task for task in tasks if task.split == "train")
    faults = task_faults([valid, replace(train, cluster=valid.cluster)], domain, 640)
    assert faults == {train.task_id: ("split_overlap", f"its world '{valid.cluster}' also serves the valid split")}


def test_near_duplicates_ignore_case_and_whitespace(domain: SearchDomain, tasks: list[Task]) -> None:
    task = tasks[0]
    twin = replace(task, task_id="z-twin", prompt=task.prompt.upper().replace(" ", "  "))
    faults = task_faults([task, twin], domain, 640)
    assert faults == {"z-twin": ("near_duplicate", f"reads like '{task.task_id}'")}


def test_long_and_empty_prompts_are_dropped(domain: SearchDomain, tasks: list[Task]) -> None:
    empty = replace(tasks[0], prompt="  ")
    assert task_faults([empty], domain, 640)[empty.task_id][0] == "empty"
    assert task_faults([tasks[0]], domain, 3)[tasks[0].task_id][0] == "too_long"


def test_similarity_is_the_share_of_matching_words() -> None:
    # Matching pieces: "a b" and "d", so M = 3 of T = 8.
    assert similarity(list("abcd"), list("abxd")) == pytest.approx(2 * 3 / 8)
    assert similarity(["a"], ["a"]) == 1.0
    assert similarity(["a"], ["b"]) == 0.0


def test_assemble_gives_requested_counts_and_difficulty_mix(
    domain: SearchDomain, records: list[RawRecord], tmp_path: Path
) -> None:
    result = assemble(domain, records, REQUESTED, tmp_path / "worlds", 1, 640)
    assert Counter(task.split for task in result.tasks) == REQUESTED
    assert Counter(task.difficulty for task in result.tasks if task.split == "train") == {1.0: 2, 2.0: 4, 3.0: 2}
    assert result.unused == len(records) - sum(REQUESTED.values())
    assert not result.rejections


def test_records_of_a_zero_weight_difficulty_are_unused(records: list[RawRecord], tmp_path: Path) -> None:
    """Contract: a record that is neither used nor rejected counts as unused."""
    domain = SearchDomain(SearchSettings(hops={1: 1.0, 2: 0.0}))
    result = assemble(domain, records, dict.fromkeys(REQUESTED, 1000), tmp_path / "worlds", 1, 640)
    assert {task.difficulty for task in result.tasks} == {1.0}
    assert result.unused == len(records) - len(result.tasks) - len(result.rejections) > 0


def test_unbuildable_records_are_rejected_and_replaced(domain: SearchDomain, records: list[RawRecord], tmp_path: Path) -> None:
    """It is rejected with file and line, the next record takes its place, and its world's file is removed."""
    number = next(i for i, record in enumerate(records) if record.split == "train")
    used = {r.record["world"] for r in records}
    broken = with_record(records[number], records[number].line, world=max(used) + 1)
    changed = [broken if i == number else record for i, record in enumerate(records)]
    result = assemble(domain, changed, {"train": 40, "valid": 2, "test": 8}, tmp_path / "worlds", 1, 640)
    assert [(r.reason, r.file, r.line) for r in result.rejections] == [("not_buildable", "raw.jsonl", broken.line)]
    assert Counter(task.split for task in result.tasks)["train"] == 40
    assert {path.stem for path in (tmp_path / "worlds").iterdir()} == {task.spec["world"] for task in result.tasks}


def test_progress_is_shown_if_the_domain_reports_it(domain: SearchDomain, records: list[RawRecord], tmp_path: Path) -> None:
    """Contract: each finished record advances the bar; a domain whose `build` takes no progress is built without one."""

    class WithoutProgress(SearchDomain):
        def build(self, records, folder, workers):  # type: ignore[no-untyped-def, override]
            return super().build(records, folder, workers)

    bars: list[Progress] = []

    @contextmanager
    def show(count: int) -> Iterator[Progress]:
        bars.append(Progress("building", count, "task"))
        yield bars[-1]

    assembled = assemble(domain, records, REQUESTED, tmp_path / "a", 1, 640, show)
    assert [(bar.done, bar.total) for bar in bars] == [(sum(REQUESTED.values()),) * 2]
    assert assemble(WithoutProgress(), records, REQUESTED, tmp_path / "b", 1, 640, show) == assembled
    assert len(bars) == 1


def test_building_worlds_counts_as_time_of_environments(records: list[RawRecord], tmp_path: Path) -> None:
    class Slow(SearchDomain):
        def build(self, *arguments: Any) -> list[Task]:
            time.sleep(0.1)
            return super().build(*arguments)

    spans.restart()
    assemble(Slow(), records, REQUESTED, tmp_path / "worlds", 1, 640)
    assert spans.totals().seconds["environment"] >= 0.1


def test_build_error_without_a_record_propagates(records: list[RawRecord], tmp_path: Path) -> None:
    class Broken(SearchDomain):
        def build(self, records, folder, workers):  # type: ignore[no-untyped-def]
            raise ValueError("the compiler is missing")

    with pytest.raises(ValueError, match="the compiler is missing"):
        assemble(Broken(), records, REQUESTED, tmp_path / "worlds", 1, 640)
