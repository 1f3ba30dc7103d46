"""One run of an experiment: its workspace, the models it links, the commit it needs, and the metrics it reads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stages.claims.runner import DVC, SOURCES, ExperimentRunner, clean_commit, read_metric
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.records.episode import write_table
from stages.runtime.workspace import EvaluationWorkspace, RunFailedError


class CopyingRunner(ExperimentRunner):
    """Runs whose stages have already written their reports."""

    code = ""

    @property
    def folder(self) -> Path:
        return self.root / "runs"

    def start(self, values: Any) -> EvaluationWorkspace:
        folder = self.root / "start"
        (folder / "reports/rl").mkdir(parents=True, exist_ok=True)
        found = {"success": {"mean": 0.5}}
        (folder / "reports/evaluation.json").write_text(json.dumps({"models": {"rl@search": {"search": found}}}))
        (folder / "reports/rl/search.json").write_text(json.dumps({"environment_steps": 9}))
        write_table(folder / "data/evaluation/rows.parquet", EVALUATION_SCHEMA, [])
        return EvaluationWorkspace(folder)


def test_run_without_a_required_metric_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExperimentRunner, "_run", lambda *arguments: 1.25)
    runner, values = CopyingRunner(tmp_path, "c" * 40), {"domains": ["search"]}
    metrics = ["panel.success", "report.recovered.accuracy"]
    found = runner.train_and_evaluate("one", values, metrics, required=["panel.success"])
    assert found.metrics == {"panel.success": 0.5, "report.recovered.accuracy": None}
    assert found.seconds == 1.2
    assert (runner.folder / "one").exists(), "until its outcome is stored"
    runner.release("one")
    assert not (runner.folder / "one").exists()
    (runner.folder / "one.done").mkdir()  # of a session that was killed while it removed the workspace
    runner.release("one")
    assert not list(runner.folder.iterdir())
    with pytest.raises(RunFailedError, match=r"no metric 'report\.recovered\.accuracy'"):
        runner.train_and_evaluate("other", values, metrics, required=metrics)


class StartingRunner(ExperimentRunner):
    """Makes its starts, by stages that take 7.5 s each, and finds in them what CopyingRunner's stages wrote."""

    code = ""

    @property
    def folder(self) -> Path:
        return self.root / "runs"

    def _check_out(self, workspace: EvaluationWorkspace) -> None:
        CopyingRunner(self.root, self.commit).start({})
        shutil.copytree(self.root / "start", workspace.folder, dirs_exist_ok=True)
        (workspace.folder / ".dvc").mkdir()


def test_making_a_start_counts_once_also_in_a_later_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the board's cost of an experiment includes its starts, however often it was interrupted."""
    monkeypatch.setattr(EvaluationWorkspace, "python", lambda *arguments: 7.5)
    monkeypatch.setattr(ExperimentRunner, "_run", lambda *arguments: 1.25)
    values = {"domains": ["search"], "per_domain": {"search": {}}, "resources": {}, "model": {"path": "hub:base"}}
    StartingRunner(tmp_path, "c" * 40).start(values)  # of a session that was killed before its first run was stored
    later = StartingRunner(tmp_path, "c" * 40)
    found = [later.train_and_evaluate(name, values, ["panel.success"]) for name in ("one", "two")]
    assert [outcome.start_seconds for outcome in found] == [7.5, 0.0]


def test_metrics_are_read_from_the_stage_reports(tmp_path: Path) -> None:
    (tmp_path / "reports/rl").mkdir(parents=True)
    found = {"success": {"mean": 0.5}, "by_difficulty": {"0": {"success": 0.75}}, "pass_at_k": {"1": 0.5, "64": 0.9}}
    found |= {"distinct_at_k": {"16": 2.5}, "solutions_differ": {"mean": 0.4, "n": 9}}
    (tmp_path / "reports/evaluation.json").write_text(json.dumps({"models": {"rl@search": {"search": found}}}))
    (tmp_path / "reports/rl/search.json").write_text(json.dumps({"dead_groups": 0.25, "recovered": {"accuracy": 0.8}}))
    rows = "\n".join(f"{step},{step / 10},{'' if step < 3 else 1.5}" for step in range(10))
    (tmp_path / "reports/rl/search_history.csv").write_text(f"step,success,entropy\n{rows}\n")
    for name, value in {
        "panel.success": 0.5,
        "panel.difficulty.0": 0.75,
        "panel.pass_at_k.64": 0.9,
        "panel.distinct_at_k.16": 2.5,
        "panel.solutions_differ": 0.4,
        "report.dead_groups": 0.25,
        "report.recovered.accuracy": 0.8,
        "history.success.mean": 0.45,
        "history.success.first": 0.05,
        "history.success.last": 0.85,
        "history.entropy.first": 1.5,
    }.items():
        assert read_metric(name, tmp_path, "search") == pytest.approx(value), name
    for name in (
        *("panel.speed", "panel.pass_at_k.32", "history.speed.mean", "history.success.median", "report.speed"),
        *("report.recovered", "report.recovered.speed", "report.dead_groups.mean"),
    ):
        with pytest.raises(RunFailedError, match=re.escape(f"no metric '{name}'")):
            read_metric(name, tmp_path, "search")


def test_steps_to_success_are_censored_at_the_budget(tmp_path: Path) -> None:
    """Contract: the first step at which the mean success of the last five reaches the share; runs that reach it after the budget
    or never are censored at the budget."""
    (tmp_path / "reports/rl").mkdir(parents=True)
    (tmp_path / "reports/rl/search.json").write_text(json.dumps({"budget": 800}))
    successes = [0.9, 0.1, 0.5, 0.5, 0.5, 0.6, 0.7, 0.9, 0.7]  # means of the last five, from the fifth on: .5 .44 .56 .64 .68
    rows = "\n".join(f"{step + 1},{success},100" for step, success in enumerate(successes))
    (tmp_path / "reports/rl/search_history.csv").write_text(f"step,success,environment_steps\n{rows}\n")
    found = {share: read_metric(f"history.steps_to_success.{share}", tmp_path, "search") for share in (40, 50, 55, 64, 68, 70)}
    assert found == {40: 500, 50: 500, 55: 700, 64: 800, 68: 800, 70: 800}


def test_clean_commit_rejects_uncommitted_stages(tmp_path: Path) -> None:
    for name in ("stages/a.py", "dvc.yaml", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    for arguments in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / "notes.txt").write_text("b")
    assert len(clean_commit(tmp_path)) == 40
    (tmp_path / "stages/a.py").write_text("b")
    with pytest.raises(RunFailedError, match=r"commit these changes first:\n *M stages/a.py"):
        clean_commit(tmp_path)


def test_a_workspace_finds_in_the_cache_what_another_has_made(tmp_path: Path) -> None:
    """Contract: starts that agree in their first stages (arms that differ in annotate) run these once."""
    files = {
        ".dvcignore": (Path(__file__).parents[2] / ".dvcignore").read_text(),
        "dvc.yaml": "stages: {one: {cmd: python -m stages.one, deps: [stages, params.yaml], outs: [out]}}",
        "params.yaml": "",
        "stages/one.py": "import stages.two\nopen('out', 'w').write(stages.two.TEXT)",
        "stages/two.py": "TEXT = 'done'",
        **{f"{name}/a": "a" for name in SOURCES if name.startswith("data/")},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    runner = ExperimentRunner(tmp_path, clean_commit(tmp_path))
    for name, said in (("first", "Running stage 'one'"), ("second", "Stage 'one' is cached - skipping run")):
        workspace = EvaluationWorkspace(tmp_path / "runs" / name)
        runner._check_out(workspace)
        subprocess.run([sys.executable, "-c", "import stages.two"], cwd=workspace.folder, check=True)  # leaves __pycache__
        workspace.python(["-c", DVC, "repro"], 1)
        assert said in (workspace.folder / "run.log").read_text()
        assert (workspace.folder / "out").read_text() == "done"


def test_a_pre_trained_model_is_linked_into_workspaces(tmp_path: Path) -> None:
    """Contract: models that no commit holds are found in the checkout, copies of a workspace do not copy them, and a missing one
    is named."""
    folder = tmp_path / "data/pretrained/m"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("large")
    runner, first = ExperimentRunner(tmp_path, "c" * 40), EvaluationWorkspace(tmp_path / "first")
    first.folder.mkdir()
    runner._link_model(first, "data/pretrained/m")
    second = EvaluationWorkspace(tmp_path / "second")
    second.copy_of(first)
    linked = second.folder / "data/pretrained/m"
    assert linked.is_symlink()
    assert (linked / "weights").read_text() == "large"
    runner._link_model(second, "hub:org/name")
    with pytest.raises(RunFailedError, match="the model data/pretrained/other does not exist"):
        runner._link_model(first, "data/pretrained/other")


def test_a_killed_idle_process_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: runs share a process while it lives; one that was killed between runs costs no run."""
    made: list[Any] = []

    class Process:
        ended = False

        def __init__(self, *arguments: object) -> None:
            made.append(self)

        def close(self) -> None: ...

    monkeypatch.setattr("stages.claims.runner.Preloaded", Process)
    monkeypatch.setattr(EvaluationWorkspace, "run", lambda workspace, programs, process: float(made.index(process)))
    runner, workspace = ExperimentRunner(tmp_path, "c" * 40), EvaluationWorkspace(tmp_path)
    assert [runner._run(workspace, [], {}) for _ in range(2)] == [0.0, 0.0]
    made[0].ended = True
    assert [runner._run(workspace, [], {}) for _ in range(2)] == [1.0, 1.0]
    assert runner._run(workspace, [], {"model": {"path": "hub:a/b"}}) == 2.0, "it may load from the hub"


def test_a_run_of_lane_control_finds_its_advisers_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: it is linked into the workspace that the lane's runs share before the run starts."""
    (tmp_path / "data/pretrained/m").mkdir(parents=True)
    (tmp_path / "data/pretrained/m/config.json").write_text("{}")
    workspace = EvaluationWorkspace(tmp_path / "shared")
    workspace.folder.mkdir()
    runner = ExperimentRunner(tmp_path, "c" * 40, program="text_grid")
    monkeypatch.setattr(runner, "_shared_workspace", lambda common: workspace)
    monkeypatch.setattr(ExperimentRunner, "code", "0" * 16)

    def play(runner: ExperimentRunner, own: EvaluationWorkspace, programs: list[list[str]], values: Any) -> float:
        (command,) = programs
        assert (own.folder / "data/pretrained/m/config.json").exists()
        result = own.folder / command[command.index("--result") + 1]
        result.write_text('{"environment_steps": 3, "control.return": 2.0}')
        return 1.25

    monkeypatch.setattr(ExperimentRunner, "_run", play)
    advised = {"decision": {"kind": "model", "model": "data/pretrained/m"}}
    assert runner.measure("run", advised, {}, ["control.return"]).metrics == {"control.return": 2.0}


def test_different_starts_are_made_side_by_side_and_equal_ones_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    both = threading.Barrier(2, timeout=60)

    def create(workspace: EvaluationWorkspace, fill: Any) -> None:
        if not workspace.folder.exists():
            both.wait()
            made.append(workspace.folder.name)
            workspace.folder.mkdir(parents=True)

    monkeypatch.setattr(EvaluationWorkspace, "create", create)
    monkeypatch.setattr(ExperimentRunner, "folder", tmp_path / "runs")
    runner = ExperimentRunner(tmp_path, "c" * 40)
    values = [{"domains": ["search"], "resources": {}, "per_domain": {"search": {}}, "seed": seed} for seed in (0, 1, 0, 1)]
    with ThreadPoolExecutor(4) as pool:
        starts = [workspace.folder for workspace in pool.map(runner.start, values)]
    assert starts[:2] == starts[2:]
    assert sorted(made) == sorted(folder.name for folder in set(starts))
