"""Lane merge of the board: arms merge the same specialists in their own ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.claims.arms import run_values, start_values
from stages.claims.checks import check_environments, check_experiment
from stages.claims.experiment import Experiment
from stages.claims.plan import Outcome, planned_runs
from stages.claims.results import Results, cost_in_seconds
from stages.claims.runner import DVC, ExperimentRunner
from stages.claims.tuning import check_trial, chosen_values, trial_runs
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.records.episode import write_table
from stages.runtime.validation import ParamsError
from stages.runtime.workspace import EvaluationWorkspace, RunFailedError

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
    assert plus["per_domain"]["textworld"]["rl"] == {}
    assert [values["evaluate"]["models"] for values in (plus, linear, sft)] == [["merged"], ["merged"], ["sft"]]
    assert (plus["merge"], linear["merge"]) == ({"weights": {}}, {"weights": {}, "method": "linear"})
    assert (plus["seed"], plus["rl"]["seed"]) == (3, 5)
    assert start_values(plus) == start_values(linear) != start_values(run_values(one, "linear", 6, PARAMS))


def test_shared_sections_hold_for_every_domain() -> None:
    """Contract: they take precedence over params.yaml's per_domain; a domain's own seed would be that of all runs."""
    shared = {"rl": {"steps": 7, "seed": 5}, "per_domain": {"search": {"rl": {"steps": 9}}}}
    values = run_values(Experiment.model_validate({**MERGES, "shared": shared}), "linear", 4, PARAMS)
    assert values["rl"]["seed"] == 4
    assert values["per_domain"]["textworld"]["rl"] == {"steps": 7}
    assert values["per_domain"]["search"]["rl"] == {"steps": 9, "group_size": 2}
    assert PARAMS["per_domain"]["search"]["rl"] == {"steps": 50, "group_size": 2}, "the input is not modified"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"ram_plus": {"rl": {"learning_rate": 0.1}}, "linear": {}}}, "differ in rl, per_domain"),
        ({"environment": "textworld+nosuch"}, "nosuch"),
        ({"measured": ["history.entropy.mean"]}, r"measures panels, not history\.entropy\.mean"),
        ({"shared": {"evaluate": {"models": ["merged", "sft"]}}}, "arm ram_plus: evaluate.models must name one model"),
    ],
)
def test_what_no_run_could_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ParamsError, ValueError), match=message):
        check_environments(check_experiment(Experiment.model_validate({**MERGES, **changes}), PARAMS, "x.yaml"), "x.yaml")


def test_the_sft_policy_is_the_same_for_all_seeds() -> None:
    one = Experiment.model_validate(MERGES)
    assert [run.name for run in planned_runs(one, PARAMS, seeds=range(2))] == [
        *("ram_plus/0", "linear/0", "sft/0"),
        *("ram_plus/1", "linear/1"),
    ]


def test_specialists_hang_on_the_resources_that_change_results() -> None:
    one = Experiment.model_validate(MERGES)
    usual, workers, precise = (
        start_values(run_values(one, "linear", 0, {**PARAMS, "resources": {**PARAMS["resources"], **changes}}))
        for changes in ({}, {"workers": 9}, {"precision": "bfloat16"})
    )
    assert usual == workers != precise


def test_the_start_trains_every_specialist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def python(workspace: EvaluationWorkspace, arguments: list[str], threads: int) -> float:
        made.extend(arguments[3:])
        (workspace.folder / ".dvc").mkdir(parents=True)
        return 2.5

    monkeypatch.setattr(EvaluationWorkspace, "python", python)
    monkeypatch.setattr(ExperimentRunner, "folder", tmp_path)
    for name in ("_check_out", "_link_model"):
        monkeypatch.setattr(ExperimentRunner, name, lambda *arguments: None)
    values = run_values(Experiment.model_validate(MERGES), "linear", 0, {**PARAMS, "model": {"path": "data/base"}})
    start = ExperimentRunner(tmp_path, "c" * 40, program="merge").start(values)
    assert made == ["repro", "rl@textworld", "rl@search"]
    assert start.folder.name.startswith("start-textworld+search-")
    assert json.loads(start.folder.with_suffix(".seconds.json").read_text()) == 2.5, "what the start cost"


def test_a_merge_setting_repeats_the_runs_of_its_arm() -> None:
    """Contract: lane rl leaves `merge` out of its keys, lane merge does not."""
    one = Experiment.model_validate(MERGES)
    keys = {run.name: run.key for run in planned_runs(one, PARAMS, seeds=[0])}
    assert len(set(keys.values())) == 3
    other = {run.name: run.key for run in planned_runs(one, {**PARAMS, "merge": {"ram": {"eps": "10%"}}}, seeds=[0])}
    assert all(keys[name] != other[name] for name in keys)


TUNED: dict[str, Any] = {
    **{**MERGES, "tune": {"key": "merge.lam", "values": [0.5, 1.0]}},
    "arms": {
        **{**MERGES["arms"], "ram_plus": {"merge": {"method": "ram_plus"}}},
        "task_arithmetic": {"merge": {"method": "task_arithmetic", "lam": 1.0}},
    },
}


def test_arms_whose_method_reads_the_key_are_tuned_on_validation_tasks() -> None:
    """Contract: linear has no lam, one arm has set its own, and the SFT policy is not merged; trials play 96 validation tasks of
    every domain, with their own specialists; the better value becomes the arm's."""
    one = Experiment.model_validate(TUNED)
    check_experiment(one, PARAMS, "x.yaml")
    params = {**PARAMS, "curate": {}}
    trials = trial_runs(one, params)
    assert [trial.name for trial in trials] == ["ram_plus/0.5/1000", "ram_plus/1.0/1000"]
    for trial, lam in zip(trials, (0.5, 1.0), strict=True):
        assert trial.values["merge"]["lam"] == lam
        assert (trial.values["evaluate"]["split"], trial.values["curate"]["valid"]) == ("valid", 96)
        assert trial.values["rl"]["seed"] == 1000
    results = Results()
    for trial, success in zip(trials, (0.7, 0.6), strict=True):
        results.add(trial, Outcome({"panel.success": success}, 0, 1.0, "c", ""))
    chosen = chosen_values(one, results)
    assert chosen == {"ram_plus": 0.5}
    runs = {run.name: run for run in planned_runs(one, params, chosen, seeds=[0])}
    assert runs["ram_plus/0"].values["merge"]["lam"] == 0.5
    assert "lam" not in runs["linear/0"].values["merge"]
    short = Outcome({}, 0, 1.0, "c", "", rows=[{}] * 150)
    with pytest.raises(RunFailedError, match="x played 75 validation tasks"):
        check_trial("x", short, len(one.domains))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune": {"key": "rl.learning_rate", "values": [0.1, 0.2]}}, "lane merge tunes a key of section merge"),
        ({"tune": {"key": "merge.density", "values": [0.1, 0.2]}}, "the method of no arm reads merge.density"),
        ({"arms": MERGES["arms"]}, "arm ram_plus: name its merge.method"),
        ({"untuned": "no time"}, "untuned is for lane rl; remove it"),
        ({"arms": {**TUNED["arms"], "other": {"merge": {"method": "ramm"}}}}, "merge.method 'ramm'"),
        ({"arms": {**TUNED["arms"], "other": {"merge": None}}}, "arm other: name its merge.method"),
    ],
)
def test_what_no_merge_can_be_tuned_by_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate({**TUNED, **changes})


def test_lanes_without_training_and_merging_tune_nothing() -> None:
    annotate = {**MERGES, "lane": "annotate", "environment": "search", "tune": {"key": "rl.epochs", "values": [1, 2]}}
    with pytest.raises(ValueError, match="tune is for lanes rl and merge; remove it"):
        Experiment.model_validate(annotate)


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


def made_rows(workspace: EvaluationWorkspace, domains: list[str]) -> None:
    """An evaluation with one task of each of `domains`, of which search alone succeeds."""
    found = {domain: {"success": {"mean": mean}} for domain, mean in (("textworld", 0.25), ("search", 0.75))}
    (workspace.folder / "reports").mkdir()
    (workspace.folder / "reports/evaluation.json").write_text(json.dumps({"models": {"merged": found}}))
    blank = {field.name: None for field in EVALUATION_SCHEMA}
    rows = [
        {**blank, **ROW, "domain": domain, "task_id": f"{domain}-1", "attempt": place, "success": domain == "search"}
        for place, domain in enumerate(domains)
    ]
    write_table(workspace.folder / "data/evaluation/rows.parquet", EVALUATION_SCHEMA, rows)


@pytest.mark.parametrize(("arm", "stages"), [("linear", ["stages.merge", "stages.evaluate"]), ("sft", ["stages.evaluate"])])
def test_success_is_the_mean_over_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str, stages: list[str]) -> None:
    """Contract: tasks and clusters of different domains are different; where nothing merged plays, nothing is merged."""
    ran: list[str] = []

    def run(runner: ExperimentRunner, workspace: EvaluationWorkspace, programs: list[list[str]], values: Any) -> float:
        ran.extend(program[0] for program in programs)
        made_rows(workspace, ["textworld", "search"])
        return 2.5

    monkeypatch.setattr(ExperimentRunner, "_run", run)
    values = run_values(Experiment.model_validate(MERGES), arm, 0, PARAMS)
    outcome = MadeRunner(tmp_path, "c" * 40, program="merge").merge_and_evaluate("one", values, ["panel.success"])
    assert ran == stages
    assert outcome.metrics == {"panel.success": 0.5}
    assert [(row["cluster"], row["successes"]) for row in outcome.rows] == [("search:test-1", 1), ("textworld:test-1", 0)]
    assert [row["task_id"] for row in outcome.rows] == ["search:search-1", "textworld:textworld-1"]
    assert (outcome.environment_steps, outcome.seconds) == (0, 2.5)


def test_a_start_is_paid_by_the_first_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what an experiment costs includes its starts, each once."""

    def python(workspace: EvaluationWorkspace, arguments: list[str], threads: int) -> float:
        assert arguments[1] == DVC
        (workspace.folder / ".dvc").mkdir()
        return 31.26

    def run(runner: ExperimentRunner, workspace: EvaluationWorkspace, programs: list[list[str]], values: Any) -> float:
        made_rows(workspace, ["textworld", "search"])
        return 2.5

    monkeypatch.setattr(EvaluationWorkspace, "python", python)
    monkeypatch.setattr(ExperimentRunner, "_run", run)
    monkeypatch.setattr(ExperimentRunner, "folder", tmp_path)
    monkeypatch.setattr(ExperimentRunner, "code", "")
    for name in ("_check_out", "_link_model"):
        monkeypatch.setattr(ExperimentRunner, name, lambda *arguments: None)
    one = Experiment.model_validate(MERGES)
    runner, results = ExperimentRunner(tmp_path, "c" * 40, program="merge"), Results()
    for run in planned_runs(one, {**PARAMS, "model": {"path": "data/base"}}, seeds=[0]):
        results.add(run, runner.merge_and_evaluate(run.name, run.values, ["panel.success"]))
    spent = [cost_in_seconds(outcome) for outcome in results.outcomes.values()]
    assert spent == [pytest.approx(33.8), *[2.5] * (len(spent) - 1)]


def test_panels_of_unequal_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: verdicts pool tasks, so that the mean over domains would be another number."""

    def unequal(runner: ExperimentRunner, workspace: EvaluationWorkspace, programs: list[list[str]], values: Any) -> float:
        made_rows(workspace, ["textworld", "search", "search"])
        return 2.5

    monkeypatch.setattr(ExperimentRunner, "_run", unequal)
    values = run_values(Experiment.model_validate(MERGES), "sft", 0, PARAMS)
    with pytest.raises(RunFailedError, match=r"'textworld': 1, 'search': 2"):
        MadeRunner(tmp_path, "c" * 40, program="merge").merge_and_evaluate("one", values, ["panel.success"])
