"""Files of the annotate stage, whole, resumed and by shards, and the choice of its tasks."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from typing import Any

import pytest
from toy_annotation import VALUES, outputs, tasks

from stages import annotate
from stages.annotation import shared_reading
from stages.annotation.forest import choose_tasks
from stages.annotation.labels import label_rows
from stages.annotation.pairs import pair_rows
from stages.annotation.search import Search
from stages.params import parse_params
from stages.records.episode import read_json, read_rows
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.shards import Shard
from stages.runtime.stage import StageContext
from stages.runtime.team import Team


def test_stage_writes_trees_labels_pairs_and_value_model(context: StageContext):
    """Contract: labels and pairs follow from the nodes, the report counts what the files hold, and no checkpoint is left."""
    annotate.run(context)
    params = context.section("annotate")
    folder = context.data / "annotated" / "toy"
    nodes = read_rows(folder / "nodes.parquet")
    assert read_rows(folder / "labels.parquet") == label_rows(nodes, params)
    assert read_rows(folder / "pairs.parquet") == pair_rows(nodes, params)
    report = read_json(context.reports / "annotate" / "toy.json")
    assert (report["trees"], report["iterations"], report["nodes"]) == (6, 6 * 12, len(nodes))
    assert report["policy_tokens"] > 0
    assert report["labels"]["count"] == len(read_rows(folder / "labels.parquet"))
    assert sum(item["count"] for item in report["value_model"]["calibration"]["bins"]) > 0
    assert report["value_model"]["held_out_tasks"] == 1
    assert (folder / "value_model" / "head.safetensors").exists()
    assert not (context.root / ".bellwether" / "checkpoints").exists() or not any(
        (context.root / ".bellwether" / "checkpoints").rglob("*.pt")
    )


def test_resumed_or_sharded_stage_writes_same_bytes(context: StageContext, monkeypatch: pytest.MonkeyPatch):
    """Contract: killed between or within chunks and run again, or after shards have grown the trees, the stage grows only missing
    trees and writes the same bytes."""
    annotate.run(context)
    whole = outputs(context)
    for folder in ("data/annotated", "reports"):
        shutil.rmtree(context.root / folder)
    grow, grown = Search.grow, []

    def dies_in_the_third_chunk(self: Search, part: Any, on_tree: Any = None) -> Any:
        if len(grown) == 2:
            raise KeyboardInterrupt
        grown.append(len(part))
        return grow(self, part, on_tree)

    monkeypatch.setattr(Search, "grow", dies_in_the_third_chunk)
    with pytest.raises(KeyboardInterrupt):
        annotate.run(context)
    assert outputs(context) == {}
    resumed = []
    monkeypatch.setattr(Search, "grow", lambda self, part, on_tree=None: resumed.append(len(part)) or grow(self, part, on_tree))
    annotate.run(context)
    assert (grown, resumed) == ([2, 2], [2])
    assert outputs(context) == whole

    # Killed within a chunk of six trees: the finished ones are not grown again.
    for folder in ("data/annotated", "reports"):
        shutil.rmtree(context.root / folder)
    values = {**VALUES, "annotate": {**VALUES["annotate"], "chunk": 6}}
    together = replace(context, params=parse_params(values))

    def dies_after_two_trees(self: Search, part: Any, on_tree: Any = None) -> Any:
        finished = []

        def stop_at_third(tree: Any) -> None:
            if len(finished) == 2:
                raise KeyboardInterrupt
            finished.append(tree)
            on_tree(tree)

        return grow(self, part, stop_at_third)

    monkeypatch.setattr(Search, "grow", dies_after_two_trees)
    with pytest.raises(KeyboardInterrupt):
        annotate.run(together)
    resumed.clear()
    monkeypatch.setattr(Search, "grow", lambda self, part, on_tree=None: resumed.append(len(part)) or grow(self, part, on_tree))
    annotate.run(together)
    assert resumed == [4]
    assert outputs(context) == whole

    # Two shards: each grows three of the six trees, two at a time; then nothing is left to grow.
    for folder in ("data/annotated", "reports"):
        shutil.rmtree(context.root / folder)
    by_shard = []
    for index in (2, 1):
        resumed.clear()
        annotate.run(replace(context, shard=Shard(index, 2)))
        by_shard.append(len(resumed))
        assert outputs(context) == {}
    resumed.clear()
    annotate.run(context)
    assert (by_shard, resumed) == ([2, 2], [])
    assert outputs(context) == whole


def with_batches(context: StageContext, tokens: int) -> StageContext:
    resources = context.params.resources.model_copy(update={"tokens_per_batch": tokens})
    return replace(context, params=context.params.model_copy(update={"resources": resources}))


def test_forks_also_read_the_states_that_the_value_model_is_fitted_to(context: StageContext, monkeypatch: pytest.MonkeyPatch):
    """Contract: when the forks have ended, the stage has nothing left to read, and writes the same bytes; resumed with other
    batches, it reads anew."""
    context = with_batches(context, 128)
    annotate.run(context)
    whole, read = outputs(context), []
    for folder in ("data/annotated", "reports"):
        shutil.rmtree(context.root / folder)
    read_run = shared_reading.read_run
    monkeypatch.setattr(shared_reading, "CHUNK", 2)
    monkeypatch.setattr(shared_reading, "read_run", lambda model, run: read.append(run) or read_run(model, run))
    with tempfile.TemporaryFile() as memory:
        annotate.run(replace(context, shard=Shard(1, 1), team=Team(0, 1, [], memory.fileno(), memory.fileno(), [])))
    assert outputs(context) == {}
    assert len(read) > 2
    assert len(list((context.root / ".bellwether" / "checkpoints").rglob("states-*.pt"))) == -(-len(read) // 2)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "clear", lambda self: None)
        read.clear()
        annotate.run(with_batches(context, 256))
        assert len(read) > 1
    monkeypatch.setattr(shared_reading, "read_run", None)
    annotate.run(context)
    assert outputs(context) == whole


def test_tasks_of_medium_difficulty_are_chosen_first():
    """Contract: tasks that the policy sometimes solves come before untried ones, these before tasks that it never or always
    solves."""
    difficulty = {"t00": 0.0, "t01": 1.0, "t02": 0.5, "t03": 0.25, "t05": 0.75, "t06": 0.0}
    for seed in range(5):
        assert [task.task_id for task in choose_tasks(tasks(8), difficulty, 3, seed)] == ["t02", "t03", "t05"]
        assert [task.task_id for task in choose_tasks(tasks(8), difficulty, 5, seed)] == ["t02", "t03", "t04", "t05", "t07"]
    assert len({tuple(task.task_id for task in choose_tasks(tasks(8), difficulty, 6, seed)) for seed in range(8)}) > 1
    assert len(choose_tasks(tasks(8), difficulty, 99, 0)) == 8
