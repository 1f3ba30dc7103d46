"""A project in which the annotate stage runs on a tiny random policy and a toy environment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from toy_annotation import VALUES, ToyDomain, tasks

from stages import annotate
from stages.params import parse_params
from stages.records.episode import write_json, write_tasks
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker


@pytest.fixture
def context(tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    """A project with 8 training tasks, measured difficulties and the tiny policy as its SFT model."""
    monkeypatch.setattr(annotate, "open_domain", lambda name, settings: ToyDomain())
    (tmp_path / "params.yaml").write_text("{}\n")
    params = parse_params(VALUES)
    write_tasks(tmp_path / "data/curated/toy/tasks.parquet", tasks(8))
    write_json(tmp_path / "data/rollouts/toy/difficulty.json", {f"t{number:02d}": (number % 3) / 2 for number in range(7)})
    shutil.copytree(tiny_policy, tmp_path / "data/models/sft")
    return StageContext("annotate", "toy", params, tmp_path, Tracker())
