"""The stage that trains a base model, run from the command line on a tiny model and little text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    **{"layers": 1, "hidden": 32, "intermediate": 32, "heads": 2, "vocabulary": 400, "batch": 20, "checkpoint_every": 2},
    "transcript_tasks": 1,
    "transcript_plays": 1,
    "phases": [
        {"steps": 2, "families": {"words": 1.0}, "softmax": "phase"},
        {"steps": 3, "families": {"recall": 1.0, "rooms": 1.0}, "transcripts": 0.3, "context_weight": 0.1},
    ],
}


def pretrain(folder: Path, workers: int) -> dict[str, bytes]:
    """The files of a base model trained by this many processes."""
    (folder / "data" / "base").mkdir(parents=True)
    (folder / "data" / "base" / "params.yaml").write_text(yaml.safe_dump(SETTINGS))
    params = {"domains": ["search"], "per_domain": {"search": {}}, "resources": {"workers": workers}}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BELLWETHER_TRACKING": "off"}
    command = [sys.executable, "-m", "stages.pretraining"]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=200)
    return {path.name: path.read_bytes() for path in sorted((folder / "data" / "base").iterdir())}


@pytest.mark.slow
@pytest.mark.long(20)
def test_any_number_of_workers_trains_the_same_model(tmp_path: Path) -> None:
    """Contract: text, tokenizer, weights and history are the same bytes."""
    alone = pretrain(tmp_path / "1", 1)
    assert {"model.safetensors", "tokenizer.json", "corpus.json", "history.csv"} <= set(alone)
    assert len(alone["history.csv"].splitlines()) == 1 + 5
    assert pretrain(tmp_path / "3", 3) == alone
