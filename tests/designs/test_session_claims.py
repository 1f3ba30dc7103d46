"""Design searches in the claims lane: replayed on a table that all arms share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from search_checkout import VALUES

from stages.claims import design_search
from stages.claims.arms import common_values, run_values
from stages.claims.checks import check_experiment
from stages.claims.design_metrics import METRICS
from stages.claims.experiment import FOLDER, load_experiment
from stages.claims.plan import metrics_of, planned_runs
from stages.claims.runner import ExperimentRunner
from stages.designs.settings import parse_search
from stages.designs.space import INDEX, Space
from stages.params import ROOT
from stages.records.episode import write_json
from stages.records.sections import deep_merge
from stages.runtime.workspace import EvaluationWorkspace


def test_replay_evaluates_a_search_on_a_table() -> None:
    """Contract: the best design by validation is evaluated on the panel; a budget of all designs finds the best one."""
    values = deep_merge(VALUES, {"design": {"budget": 12, "method": "random"}})
    params = parse_search(values)
    space = Space.of(params)
    table = {}
    for index, design in enumerate(space.all()):
        warm, recall = design[INDEX["temperature"]], design[INDEX["recall"]] == "task"
        score = round(0.3 + 0.4 * warm + 0.1 * recall + 0.001 * index, 6)
        of = {"error": 0.05, "failures": {}, "failed": "", "seconds": 0.0}
        table[space.name(design)] = {
            split: {"score": one, "by_domain": {"search": [one, 0.05]}, **of}
            for split, one in (("valid", score), ("test", 1 - score))
        }
    features = {"difficulty": 1.0, "prompt_words": 4.0, "max_turns": 8.0}
    found = design_search.replay(params, table, features)
    assert tuple(found) == METRICS
    best = max(one["valid"]["score"] for one in table.values())
    assert found["best.40"] == best
    assert found["found.40"] == pytest.approx(1 - best)
    assert found["regret.40"] == pytest.approx(max(one["test"]["score"] for one in table.values()) - (1 - best))
    assert found["rank_correlation"] == 0.0
    assert found == design_search.replay(params, table, features)
    guided = parse_search(deep_merge(values, {"design": {"method": "agentswift", "budget": 8}}))
    found = design_search.replay(guided, table, features)
    assert found["rank_correlation"] > 0.5
    assert found["area"] <= found["best.10"] <= best


def test_experiment_arms_share_a_start_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: arms differ only in `design`, runs of a seed only in the arm; the table is made before the first run."""
    experiment = load_experiment(ROOT / FOLDER / "agentswift.yaml")
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    checked = check_experiment(experiment, params, "agentswift.yaml")
    assert {len(Space.of(one).all()) for one in checked.values()} == {180}
    common = common_values(experiment, params)
    for arm in experiment.arms:
        values = run_values(experiment, arm, 3, params)
        assert values["design"]["seed"] == 3
        assert {**values, "design": 0} == {**common, "design": 0}
        assert design_search.table_path(checked[arm], Space.of(checked[arm])) == design_search.table_path(
            parse_search(common), Space.of(parse_search(common))
        )
    assert set(metrics_of(experiment)) == {f"designs.{name}" for name in METRICS}
    keys = {run.key for run in planned_runs(experiment, params)}
    assert len(keys) == len(experiment.arms) * len(experiment.seeds)

    commands: list[list[str]] = []
    numbers = dict.fromkeys(metrics_of(experiment), 0.5)

    def run(workspace: EvaluationWorkspace, arguments: list[str], threads: int) -> float:
        commands.append(arguments[2:3])
        return 1.5

    def play(runner: ExperimentRunner, workspace: EvaluationWorkspace, programs: list[list[str]], values: Any) -> float:
        (arguments,) = programs
        commands.append(arguments[1:2])
        write_json(workspace.folder / arguments[arguments.index("--result") + 1], {**numbers, "environment_steps": 0})
        return 1.5

    monkeypatch.setattr(ExperimentRunner, "start", lambda self, values: EvaluationWorkspace(tmp_path))
    monkeypatch.setattr(EvaluationWorkspace, "python", run)
    monkeypatch.setattr(ExperimentRunner, "_run", play)
    values = {**run_values(experiment, "random", 1, params)}
    monkeypatch.setattr(ExperimentRunner, "code", "")
    found = ExperimentRunner(tmp_path, "c" * 40, program="designs").measure("run", values, common, metrics_of(experiment))
    assert commands == [["--table"], ["--settings"]]
    assert found.metrics == numbers
