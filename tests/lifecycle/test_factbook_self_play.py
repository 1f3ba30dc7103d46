"""Search self-play runs on factbook by its profile, on the tiny profile's sizes. A random model plays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT, Checkout

from stages import curate, rl, rollout, sft
from stages.params import load_params
from stages.records.episode import read_rows
from stages.runtime.overlay import overlaid, write_params
from stages.runtime.stage import StageContext

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
LENGTH = 4096
"""Room for the tiny tokenizer, which knows few words."""
SIZES: dict[str, Any] = {
    "model": {"max_length": LENGTH},
    "rl": {"steps": 2, "tasks_per_step": 3, "group_size": 3, "sampling": {"max_tokens": 8}},
    "per_domain": {"factbook": {"curate": {"train": 10, "test": 4}}},
}


def test_self_play_runs_on_factbook(source: Path, tmp_path: Path) -> None:
    """Contract: the profile's scripted conversations all become demonstrations, and both roles play and are trained."""
    base = Checkout.make(tmp_path / "run", source)
    config = base.root / "data" / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": LENGTH}))
    path = base.root / "params.yaml"
    write_params(path, overlaid(path, ROOT / "profiles" / "methods" / "ssp_factbook.yaml"))
    base.edit(SIZES)
    tracker: Any = SimpleNamespace(**dict.fromkeys(("params", "metric", "artifact", "episodes"), lambda *_, **__: None))
    for name, stage in (("curate", curate), ("sft", sft), ("rollout", rollout), ("rl", rl)):
        domain = None if name == "sft" else "factbook"
        stage.run(StageContext(name, domain, load_params(path), base.root, tracker))
    imports = json.loads((base.root / "reports" / "curate" / "factbook.json").read_text())["imports"]["files"]
    assert imports["data/raw/self_play/factbook.jsonl"]["demonstrations"] == 60
    report = json.loads((base.root / "reports" / "rl" / "factbook.json").read_text())
    assert (report["algorithm"], report["ledger/environment_tokens_trained"]) == ("ssp", 0)
    assert report["ledger/policy_tokens_trained"] > 0
    assert sorted(report["self_play"]["prompts"]) == ["dummy.txt", "proposer_topic.txt", "reader.txt"]
    roles = {row["role"] for row in read_rows(base.root / "data" / "rl" / "factbook" / "samples.parquet")}
    assert {"proposer", "solver"} <= roles
