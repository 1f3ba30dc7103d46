"""The curate stage on a tiny search domain."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.curate import run, warn
from stages.curation.messages import MOST_WARNINGS
from stages.curation.panel import read_panel
from stages.environments.search import SearchDomain
from stages.params import parse_params
from stages.records.episode import read_episodes, read_json, read_tasks
from stages.runtime.stage import StageContext

ROOT = Path(__file__).resolve().parents[2]
PARAMS = {
    "domains": ["search"],
    "curate": {"train": 8, "valid": 2, "test": 10},
    "resources": {"workers": 1, "threads": 1},
    "per_domain": {"search": {}},
}


def curate(folder: Path, lines: list[str], hash_seed: int = 0, **changes: object) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump({**PARAMS, **changes}), encoding="utf-8")
    (folder / "data/raw").mkdir(parents=True, exist_ok=True)
    (folder / "data/raw/search.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    environment = {**os.environ, "BELLWETHER_TRACKING": "off", "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "stages.curate", "--domain", "search"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def output_hashes(folder: Path) -> dict[str, str]:
    paths = [path for part in ("data/curated", "reports") for path in (folder / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def test_outputs_are_byte_identical(lines: list[str], tmp_path: Path) -> None:
    """The same raw file and parameters give the same bytes for any hash seed and number of processes."""
    for name, seed, workers in (("a", 1, 1), ("b", 2, 2)):
        done = curate(tmp_path / name, lines, seed, resources={"workers": workers, "threads": 1})
        assert done.returncode == 0, done.stderr
    hashes = output_hashes(tmp_path / "a")
    assert hashes == output_hashes(tmp_path / "b")
    curated = {Path(name).name for name in hashes}
    assert {"tasks.parquet", "demonstrations.parquet", "panel.json", "search.json"} <= curated
    assert not [name for name in hashes if name.endswith(".partial")]


def test_rejected_records_are_reported_and_the_rest_is_used(lines: list[str], tmp_path: Path) -> None:
    done = curate(tmp_path, [lines[0], "{broken", lines[0], *lines[1:]])
    assert done.returncode == 0, done.stderr
    assert "data/raw/search.jsonl:2: malformed" in done.stderr
    assert "data/raw/search.jsonl:3: duplicate_id" in done.stderr
    report = read_json(tmp_path / "reports/curate/search.json")
    assert report["rejected"] == {"duplicate_id": 1, "malformed": 1}
    assert [item["where"] for item in report["rejections"]] == ["data/raw/search.jsonl:2", "data/raw/search.jsonl:3"]
    assert {split: report["splits"][split]["kept"] for split in report["splits"]} == PARAMS["curate"]
    folder = tmp_path / "data/curated/search"
    tasks = read_tasks(folder / "tasks.parquet")
    panel = read_panel(folder)
    assert report["panel"] == {"hash": panel.hash, "n": 10}
    shown = {episode.task_id for episode in read_episodes(folder / "demonstrations.parquet")}
    assert shown == {task.task_id for task in tasks if task.split != "test"}


class RecordingTracker:
    """A tracker that keeps the metrics and sends nothing."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def params(self, values: dict[str, Any]) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self.metrics[name] = value


def curate_here(folder: Path, lines: list[str] | None, **changes: object) -> dict[str, float]:
    """Runs the stage in this process; returns its metrics."""
    if lines is not None:
        (folder / "data/raw").mkdir(parents=True)
        (folder / "data/raw/search.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tracker = RecordingTracker()
    run(StageContext("curate", "search", parse_params({**PARAMS, **changes}), folder, tracker))  # type: ignore[arg-type]
    return tracker.metrics


def test_many_warnings_are_counted_instead_of_printed(capsys: pytest.CaptureFixture[str]) -> None:
    warn("maze", range(MOST_WARNINGS))
    warn("maze", range(MOST_WARNINGS + 3))
    *printed, last = capsys.readouterr().err.splitlines()
    assert len(printed) == 2 * MOST_WARNINGS
    assert last.startswith("curate@maze: 3 more")
    assert "reports/curate/maze.json" in last


def test_too_few_records_are_reported(lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = curate_here(tmp_path, lines, curate={"train": 5000, "valid": 2, "test": 10})
    assert metrics["curate/kept_train"] == 56
    assert metrics["curate/kept_test"] == 10
    assert "train: only 56 of the 5000 requested tasks (curate.train)" in capsys.readouterr().err


def test_raw_file_of_other_settings_warns_once(lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: the warning is printed once and is in the data report; progress of building is shown."""
    curate_here(tmp_path, lines, per_domain={"search": {"environment": {"hops": {1: 1.0, 2: 1.0}}}})
    printed = capsys.readouterr()
    assert printed.err.count("was made with other settings") == 1
    assert "building 20/20 tasks" in printed.out
    (warning,) = read_json(tmp_path / "reports/curate/search.json")["source"]["warnings"]
    assert f"curate@search: {warning}" in printed.err


def test_unsuccessful_expert_fails_or_warns(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: curate fails if no demonstration succeeds, unless none are requested; if the expert solves less than half, the
    terminal and the data report warn."""
    solve = SearchDomain.expert
    monkeypatch.setattr(SearchDomain, "expert", lambda domain, environment: "answer nobody")
    with pytest.raises(ValueError, match=r"domain search: none of the expert's 10 demonstrations is usable \(failed 10\)"):
        curate_here(tmp_path / "a", lines)
    none = {**PARAMS["curate"], "expert_demonstrations": 0, "noisy_demonstrations": 0}
    assert curate_here(tmp_path / "b", lines, curate=none)["curate/demonstrations"] == 0

    def rarely(domain: SearchDomain, environment: Any) -> str | None:
        return solve(domain, environment) if environment.task.task_id.endswith("-0") else "answer nobody"

    monkeypatch.setattr(SearchDomain, "expert", rarely)
    curate_here(tmp_path / "c", lines, curate={**PARAMS["curate"], "train": 40})
    (warning,) = read_json(tmp_path / "c/reports/curate/search.json")["source"]["warnings"]
    assert "the expert solved" in warning
    assert f"curate@search: {warning}" in capsys.readouterr().err


def test_recipes_are_used_without_a_raw_file(tmp_path: Path) -> None:
    metrics = curate_here(tmp_path, None)
    assert metrics["curate/kept_train"] == 8
    assert read_json(tmp_path / "reports/curate/search.json")["source"]["file"] == "recipes of domain search"


def test_fixed_test_seed_gives_every_seed_the_same_panel(lines: list[str], tmp_path: Path) -> None:
    """Contract: with curate.seeds.test all seeds of a run train on the file's tasks and share one panel."""
    hashes, tasks = [], []
    for name, seed, own in (("a", 0, {}), ("b", 0, {"seeds": {"test": 7}}), ("c", 5, {"seeds": {"test": 7}})):
        curate_here(tmp_path / name, lines, seed=seed, curate={**PARAMS["curate"], "test": 24, **own})
        hashes.append(read_panel(tmp_path / name / "data/curated/search").hash)
        tasks.append({task.split: [] for task in read_tasks(tmp_path / name / "data/curated/search/tasks.parquet")})
        for task in read_tasks(tmp_path / name / "data/curated/search/tasks.parquet"):
            tasks[-1][task.split].append(task.task_id)
    assert hashes[0] != hashes[1] == hashes[2]
    assert tasks[0]["train"] == tasks[1]["train"] == tasks[2]["train"]
    assert len(tasks[1]["test"]) == 24
    assert not set(tasks[0]["test"]) & set(tasks[1]["test"])
    assert read_json(tmp_path / "b/reports/curate/search.json")["source"]["drawn"]["test"]["seed"] == 7


def test_raw_file_without_usable_records_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gives no usable task for train, valid, test"):
        curate_here(tmp_path, ["{broken"])
