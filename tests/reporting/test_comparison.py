"""Verdicts of a comparison of settings: by the rules of the claims board, per task where there are rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stages.claims.inference import Sample
from stages.claims.inference import compare as estimate
from stages.records.episode import read_json, write_table
from stages.reporting.comparison import verdicts_of, write

SCHEMA = pa.schema([(name, pa.string()) for name in ("model", "domain", "cluster", "task_id")] + [("success", pa.bool_())])
TASKS = [(f"w{number // 2}", f"t{number}") for number in range(8)]


def rows_file(path: Path, model: str, outcomes: np.ndarray) -> Path:
    """One run's evaluation rows: outcomes [8 tasks, 2 attempts] of `model` on domain a, and failures of another model."""
    rows = [
        {"model": name, "domain": "a", "cluster": cluster, "task_id": task, "success": bool(value) and name == model}
        for name in (model, "base")
        for (cluster, task), attempts in zip(TASKS, outcomes, strict=True)
        for value in attempts
    ]
    write_table(path, SCHEMA, rows)
    return path


def comparison(scores: dict[str, np.ndarray], **changes: Any) -> dict[str, Any]:
    settings = {name: {"overrides": [], "model": "specialist"} for name in scores}
    given = {"settings": settings, "seeds": list(range(4)), "looks": [2, 4], "metric": "success", "vary": "rl.seed"}
    rules = {"claim": None, "margin": 0.05, "threshold": 0.0, "domains": ["a"]}
    return {**given, **rules, "scores": {name: of[:, None].tolist() for name, of in scores.items()}, **changes}


def test_verdicts_per_task_are_those_of_the_board(tmp_path: Path) -> None:
    """Contract: the interval is the crossed one over seeds and clusters of tasks; without rows, over seeds alone."""
    rng = np.random.default_rng(0)
    outcomes = {"one": rng.random((4, 8, 2)) < 0.3, "two": rng.random((4, 8, 2)) < 0.7}
    rows = {
        name: [rows_file(tmp_path / f"{name}{seed}.parquet", "rl@a", of[seed]) for seed in range(4)]
        for name, of in outcomes.items()
    }
    given = comparison({name: of.mean(axis=(1, 2)) for name, of in outcomes.items()})
    found = verdicts_of(given, rows)["two"]["looks"][0]
    clusters = [cluster for cluster, _ in TASKS]
    samples = [Sample.of_tasks(outcomes[name][:2].mean(axis=2), clusters) for name in ("two", "one")]
    expected = estimate(*samples, found["alpha"])
    assert (found["seeds"], found["clusters"]) == (2, 4)
    assert [found[end] for end in ("difference", "low", "high")] == pytest.approx(
        [expected.difference, expected.low, expected.high], abs=1e-5
    )
    alone = verdicts_of(given, {})["two"]["looks"][0]
    assert alone["clusters"] == 0
    assert alone["difference"] == pytest.approx(found["difference"], abs=1e-5)
    rows["two"][1] = rows_file(tmp_path / "other.parquet", "sft", outcomes["two"][1])
    assert verdicts_of(given, rows)["two"]["looks"][0] == alone, "runs that played different tasks are compared over seeds alone"


def test_settings_with_fewer_seeds_are_judged_by_the_seeds_of_both(tmp_path: Path) -> None:
    """One setting is decided at the first look and has two runs; the other plays on with the first setting."""
    base = np.array([0.50, 0.52, 0.49, 0.51])
    scores = {"one": base, "better": base[:2] + np.array([0.300, 0.301]), "worse": base - np.array([0.1, 0.2, 0.101, 0.102])}
    given = comparison(scores, claim="superiority", threshold=0.1)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(given))
    write(path, {})
    found = read_json(path)["verdicts"]
    assert [(look["seeds"], look["verdict"]) for look in found["better"]["looks"]] == [(2, "reproduced")]
    assert [look["seeds"] for look in found["worse"]["looks"]] == [2, 4]
    assert found["worse"]["effect"] == "worse"
    assert found["worse"]["verdict"] == "not reproduced"
    page = path.with_suffix(".md").read_text()
    assert "| **better** |" in page
    assert "Claim of superiority: `better`: **reproduced**; `worse`: **not reproduced**." in page
    assert "after 2, 4 seeds" in page
