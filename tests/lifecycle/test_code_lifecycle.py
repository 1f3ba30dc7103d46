"""The pipeline with the domain `code`, whose programs run in the sandbox, on the tiny profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkout import Checkout

from stages.records.episode import read_tasks
from stages.sandbox.backends import SAFE
from stages.sandbox.probe import fault

UNAVAILABLE = [f"{name}: {reason}" for name in SAFE if (reason := fault(name))]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.long(200),
    pytest.mark.skipif(len(UNAVAILABLE) == len(SAFE), reason="no sandbox on this machine: " + "; ".join(UNAVAILABLE)),
]


def test_search_and_code_run_end_to_end(source: Path, tmp_path: Path) -> None:
    """Contract: `domains: [search, code]` gives models, panels and a report of both, and a second run has nothing to do."""
    checkout = Checkout.make(tmp_path / "checkout", source)
    checkout.edit({"domains": ["search", "code"]})
    ran, restored = checkout.repro()
    assert {"curate@code", "rollout@code", "annotate@code", "rl@code", "merge", "evaluate", "report"} <= set(ran)
    assert restored == []
    evaluation = json.loads((checkout.root / "reports" / "evaluation.json").read_text())
    assert set(evaluation["panels"]) == {"search", "code"}
    assert {"base", "sft", "rl@code", "merged"} <= set(evaluation["models"])
    tasks = read_tasks(checkout.root / "data" / "curated" / "code" / "tasks.parquet", "train")
    assert all(task.spec["near_misses"] for task in tasks)
    assert checkout.repro() == ([], [])
