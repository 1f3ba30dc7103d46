"""Lane merge of the board: arms merge the same specialists in their own ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.claims.checks import check_experiment
from stages.claims.experiment import Experiment, run_values, start_values
from stages.claims.plan import planned_runs
from stages.claims.runner import ExperimentRunner
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.records.episode import read_rows, write_table
from stages.runtime.workspace import EvaluationWorkspace

MERGES: dict[str, Any] = {
    **{"method": "m", "paper": "p", "switch": "s", "family": "merging", "lane": "merge", "environment": "textworld+search"},
    "shared": {"per_domain": {"search": {"rl": {"steps": 3}}}},
    "arms": {"ram_plus": {}, "linear": {"merge": {"method": "linear"}}, "sft": {"evaluate": {"models": ["sft"]}}},
    "claims": [{"says": "x", "arm": "ram_plus", "against": "linear"}],
}
PARAMS: dict[str, Any] = {
    **{"seed": 3, "domains": ["search"], "resources": {"device": "cpu", "threads": 1, "workers": 1}},
    **{"merge": {"weights": {"search": 2.0}}, "rl": {"learning_rate": 0.001}},
    "per_domain": {"textworld": {}, "search": {"rl": {"steps": 50, "group_size": 2}}, "shop": {}},
}


def test_arms_differ_in_the_merge_alone() -> None:
    """Contract: all domains with their own settings; the seed is that of rl; a seed's arms share their specialists."""
    one = Experiment.model_validate(MERGES)
    check_experiment(one, PARAMS, "x.yaml")
    plus, linear, sft = (run_values(one, arm, 5, PARAMS) for arm in one.arms)
    assert plus["domains"] == ["textworld", "search"]
    assert sorted(plus["per_domain"]) == ["search", "textworld"]
    assert plus["per_domain"]["search"]["rl"] == {"steps": 3, "group_size": 2}
    assert [values["evaluate"]["models"] for values in (plus, linear, sft)] == [["merged"], ["merged"], ["sft"]]
    assert (plus["merge"], linear["merge"]) == ({"weights": {}}, {"weights": {}, "method": "linear"})
    assert (plus["seed"], plus["rl"]["seed"]) == (3, 5)
    assert start_values(plus) == start_values(linear) != start_values(run_values(one, "linear", 6, PARAMS))


def test_a_merge_setting_repeats_the_runs_of_its_arm() -> None:
    """Contract: lane rl leaves `merge` out of its keys, lane merge does not."""
    one = Experiment.model_validate(MERGES)
    keys = {run.name: run.key for run in planned_runs(one, PARAMS, seeds=[0])}
    assert len(set(keys.values())) == 3
    other = {run.name: run.key for run in planned_runs(one, {**PARAMS, "merge": {"ram": {"eps": "10%"}}}, seeds=[0])}
    assert all(keys[name] != other[name] for name in keys)


@pytest.mark.parametrize(("lane", "environment"), [("merge", "search"), ("annotate", "textworld+search")])
def test_only_lane_merge_has_several_domains(lane: str, environment: str) -> None:
    with pytest.raises(ValueError, match=r"lane merge, and no other, has several domains: textworld\+search"):
        Experiment.model_validate({**MERGES, "lane": lane, "environment": environment})


ROW = {
    **{"attempt": 0, "turns": 2, "tokens": 5, "accepted": 1.0, "cost": 1.0, "difficulty": 1.0, "reward": 1.0},
    **{"model": "merged", "policy_hash": "h", "cluster": "test-1", "split": "test"},
}


class MadeRunner(ExperimentRunner):
    """Its specialists are made; merge and evaluate only record that they ran."""

    code = ""

    @property
    def folder(self) -> Path:
        return self.root / "runs"

    def start(self, values: Any) -> EvaluationWorkspace:
        (self.root / "start").mkdir(exist_ok=True)
        return EvaluationWorkspace(self.root / "start")


def test_success_is_the_mean_over_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: panels of equal number of tasks count alike; clusters of different domains are different."""
    ran: list[str] = []

    def python(workspace: EvaluationWorkspace, arguments: list[str], threads: int) -> None:
        ran.extend(command[0] for command in json.loads(arguments[2]))
        found = {domain: {"success": {"mean": mean}} for domain, mean in (("textworld", 0.25), ("search", 0.75))}
        (workspace.folder / "reports").mkdir()
        (workspace.folder / "reports/evaluation.json").write_text(json.dumps({"models": {"merged": found}}))
        blank = {field.name: None for field in EVALUATION_SCHEMA}
        rows = [
            {**blank, **ROW, "domain": domain, "task_id": f"{domain}-1", "success": domain == "search"}
            for domain in ("textworld", "search")
        ]
        write_table(workspace.folder / "data/evaluation/rows.parquet", EVALUATION_SCHEMA, rows)
        assert len(read_rows(workspace.folder / "data/evaluation/rows.parquet")) == 2

    monkeypatch.setattr(EvaluationWorkspace, "python", python)
    runner = MadeRunner(tmp_path, "c" * 40, program="merge")
    outcome = runner.merge_and_evaluate(
        "one", run_values(Experiment.model_validate(MERGES), "linear", 0, PARAMS), ["panel.success"]
    )
    assert ran == ["stages.merge", "stages.evaluate"]
    assert outcome.metrics == {"panel.success": 0.5}
    assert [(row["cluster"], row["successes"]) for row in outcome.rows] == [("search:test-1", 1), ("textworld:test-1", 0)]
    assert outcome.environment_steps == 0
