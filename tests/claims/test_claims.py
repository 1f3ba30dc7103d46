"""The claims board: experiments fixed before the run, resumable runs, verdicts, and pages made from the result files."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from stages.algorithms.registry import names
from stages.claims import __main__ as stage
from stages.claims.arms import arm_values, run_values, start_values
from stages.claims.checks import check_environments, check_experiment
from stages.claims.experiment import FOLDER, Experiment, digest, load_experiment, slugs
from stages.claims.judging import report
from stages.claims.judging import write as write_results
from stages.claims.plan import Outcome, metrics_of, planned_runs, required_of, shaping
from stages.claims.results import Results
from stages.claims.rows import Tables, curve_of, paths, task_rows
from stages.claims.runner import ExperimentRunner, clean_commit, read_metric
from stages.claims.session import drop_outdated
from stages.control.problems import PROBLEMS
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.params import ROOT
from stages.records.episode import write_table
from stages.reporting.board.experiment_page import LANES, page_of
from stages.reporting.board.index import PAGE
from stages.reporting.board.pages import pages as board_pages
from stages.reporting.board.rows import OUTDATED
from stages.reporting.board.rows import rows as board_rows
from stages.runtime.validation import ParamsError
from stages.runtime.workspace import EvaluationWorkspace, RunFailedError

SPEC: dict[str, Any] = {
    "method": "RLOO",
    "paper": "arXiv 2402.14740",
    "switch": "rl.algorithm: rloo",
    "family": "policy_optimisation",
    "environment": "search",
    "budget": {"environment_steps": 1000},
    "untuned": "arms share everything",
    "ungated": "a test",
    "shared": {"rl": {"tasks_per_step": 4, "group_size": 8}},
    "arms": {"rloo": {"rl": {"algorithm": "rloo"}}, "grpo": {"rl": {"algorithm": "grpo"}}},
    "claims": [{"says": "RLOO is better than GRPO.", "arm": "rloo", "against": "grpo", "threshold": 0.02}],
}
PARAMS: dict[str, Any] = {
    "seed": 3,
    "domains": ["textworld", "search"],
    "resources": {"device": "cpu", "threads": 2},
    "rl": {"learning_rate": 0.001},
    "merge": {"weights": {"textworld": 2.0}},
    "per_domain": {"textworld": {}, "search": {"rl": {"steps": 50, "group_size": 2}, "environment": {"echo_query": True}}},
}


def experiment(**changes: Any) -> Experiment:
    return Experiment.model_validate({**SPEC, **changes})


def write(root: Path, slug: str = "rloo", **changes: Any) -> Experiment:
    path = root / FOLDER / f"{slug}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**SPEC, **changes}, sort_keys=False), encoding="utf-8")
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")  # no code bears on the runs
    return load_experiment(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "tricks"}, "family"),
        ({"looks": [8, 8]}, r"looks must be one to 4 growing numbers of seeds from 2 on, not \[8, 8\]"),
        ({"untuned": None}, "lane rl needs tune, or untuned with the reason; it has neither"),
        ({"gate": {"baseline": "grpo"}}, "it has gate and ungated"),
        ({"ungated": None, "gate": {"baseline": "ppo"}}, r"gate names \['ppo'\]; the arms are rloo, grpo"),
        ({"untuned": None, "tune": {"key": "rl.learning_rate", "values": [0.1, 0.01]}}, "values must ascend"),
        ({"untuned": None, "tune": {"key": "sft.epochs", "values": [1, 2]}}, "tune.key"),
        ({"claims": [{**SPEC["claims"][0], "threshold": -0.02}]}, "greater than or equal to 0"),
        ({"claims": [{**SPEC["claims"][0], "metric": "panel.cost"}]}, "margin"),
        ({"claims": [{**SPEC["claims"][0], "kind": "equivalence"}]}, "a claim of equivalence has a margin only"),
        ({"arms": {"rloo": {}}}, "arms"),
        ({"claims": []}, "claims"),
        ({"budget": {}}, r"budget\.environment_steps"),
        ({"treshold": 1}, "unknown key 'treshold'"),
        ({"claims": [{**SPEC["claims"][0], "arm": "ppo"}]}, r"claim 1 names \['ppo'\]; the arms are rloo, grpo"),
        ({"claims": [{**SPEC["claims"][0], "arm": "grpo"}]}, "with itself"),
        ({"claims": [{**SPEC["claims"][0], "metric": "success"}]}, "metric"),
    ],
)
def test_invalid_experiment_error_names_file_and_key(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=rf"(?s)rloo\.yaml.*{message}"):
        write(tmp_path, **changes)


def test_arm_values_override_shared_and_domain_values() -> None:
    """params.yaml, then its overrides for the domain, then `shared`, then the arm; the budget ends every run."""
    values = run_values(experiment(), "rloo", 7, PARAMS)
    assert values["domains"] == ["search"]
    assert values["per_domain"]["search"]["environment"] == {"echo_query": True}
    assert values["per_domain"]["search"]["rl"] == {}
    rl = values["rl"]
    assert (rl["algorithm"], rl["learning_rate"], rl["group_size"], rl["seed"]) == ("rloo", 0.001, 8, 7)
    assert rl["environment_steps"] == 1000
    assert rl["steps"] == 32, "episodes of one turn each would still reach the budget: 1000 / (4 * 8) rounded up"
    assert values["evaluate"]["models"] == ["rl@search"]
    assert values["merge"]["weights"] == {}
    own = experiment(arms={"a": {"per_domain": {"search": {"rl": {"group_size": 16}}}}, "b": {"rl": {"steps": 5}}},
                     claims=[{**SPEC["claims"][0], "arm": "a", "against": "b"}])  # fmt: skip
    assert arm_values(own, "a", PARAMS)["rl"]["group_size"] == 16
    assert arm_values(own, "b", PARAMS)["rl"]["steps"] == 5
    assert PARAMS["per_domain"]["search"]["rl"] == {"steps": 50, "group_size": 2}, "the input is not modified"


def test_arms_and_seeds_share_the_starting_policy() -> None:
    """A claim about rl compares policies trained from one SFT policy, so everything before rl is the same for all runs."""
    starts = [start_values(run_values(experiment(), arm, seed, PARAMS)) for arm in SPEC["arms"] for seed in (0, 1)]
    assert all(start == starts[0] for start in starts)
    differing = {"a": {"sft": {"epochs": 1.0}}, "b": {}}
    claims = [{**SPEC["claims"][0], "arm": "a", "against": "b"}]
    with pytest.raises(ParamsError, match=r"(?s)arm 'b' and arm 'a' differ in sft.*start: own"):
        check_experiment(experiment(arms=differing, claims=claims), PARAMS, "x.yaml")
    check_experiment(experiment(arms=differing, claims=claims, start="own"), PARAMS, "x.yaml")


def test_invalid_override_error_names_the_arm() -> None:
    bad = {"rloo": {"rl": {"group_sise": 4}}, "grpo": {}}
    with pytest.raises(ParamsError, match=r"x\.yaml: arm 'rloo'.*group_sise.*group_size"):
        check_experiment(experiment(arms=bad), PARAMS, "x.yaml")


def test_setting_invalid_for_the_environment_names_the_arm() -> None:
    """Contract: arms must pass the checks of `python -m stages.params`."""
    arms = {"rloo": {}, "grpo": {"annotate": {"returns": [-1.0, 1.0]}}}
    checked = check_experiment(experiment(arms=arms, start="own"), PARAMS, "x.yaml")
    with pytest.raises(ParamsError, match=r"x\.yaml: arm 'grpo': in per_domain\.search: .*annotate\.returns to \[0\.0, 1\.0\]"):
        check_environments(checked, "x.yaml")
    check_environments({"rloo": checked["rloo"]}, "x.yaml")


def outcome(success: float, **metrics: float | None) -> Outcome:
    found = {**dict.fromkeys(metrics_of(experiment()), success), **metrics}
    return Outcome(found, 1010, 2.0, "c" * 40, "0" * 16)


def fill(results: Results, runs: list, rloo: list[float], grpo: list[float]) -> None:
    for run in runs:
        values = {"rloo": rloo, "grpo": grpo}[run.arm]
        if run.seed < len(values):
            results.add(run, outcome(values[run.seed]))


def missing(results: Results, runs: list) -> list[str]:
    return [run.name for run in results.missing(runs)]


def test_finished_runs_are_kept_unless_parameters_change(tmp_path: Path) -> None:
    one = write(tmp_path, looks=[3, 5])
    runs, results = planned_runs(one, PARAMS), Results()
    assert [run.name for run in runs[:3]] == ["rloo/0", "grpo/0", "rloo/1"], "seed by seed"
    fill(results, runs, [0.5, 0.5, 0.5], [0.4])
    write_results(tmp_path, "rloo", one, results)
    loaded = Results.load(tmp_path, "rloo")
    assert missing(loaded, runs) == ["grpo/1", "grpo/2", "rloo/3", "grpo/3", "rloo/4", "grpo/4"]
    faster = planned_runs(one, {**PARAMS, "resources": {"device": "cpu", "threads": 64, "slots": 8}, "report": {"episodes": 1}})
    assert len(loaded.missing(faster)) == 6, "resources and report are not part of a run"
    spelled = planned_runs(one, {**PARAMS, "sft": {"epochs": 4.0}, "rl": {**PARAMS["rl"], "credit": {"key": None}}})
    assert len(loaded.missing(spelled)) == 6, "nor are explicit defaults"
    changed = {**PARAMS, "rl": {"learning_rate": 0.002}}
    assert len(loaded.missing(planned_runs(one, changed))) == 10
    assert drop_outdated(one, PARAMS, loaded) == 0
    assert drop_outdated(one, changed, loaded) == 4
    assert loaded.outcomes == {}


def test_run_key_depends_only_on_its_parameters() -> None:
    """Contract: a run stays valid if a claim or metric is added; each seed's key is the hash of its own settings."""
    more = experiment(
        measured=["panel.reward"], claims=[*SPEC["claims"], {**SPEC["claims"][0], "metric": "panel.turns", "margin": 1}]
    )
    runs = planned_runs(experiment(), PARAMS)
    assert [run.key for run in runs] == [run.key for run in planned_runs(more, PARAMS)]
    for run in (runs[0], runs[-1]):
        assert run.key == digest(shaping(experiment(), run.values))
    assert len({run.key for run in runs}) == 2 * 20
    annotate = Experiment.model_validate(CHOICE)
    for run in planned_runs(annotate, PARAMS, seeds=[0, 1, 5]):
        assert run.key == digest(shaping(annotate, run.values)), run.name


def test_run_without_a_metric_is_repeated_unless_rows_give_it() -> None:
    """Contract: pass@k and difficulty can be computed after the runs; metrics that were not measured cannot."""
    rows = [
        {"task_id": name, "cluster": name, "difficulty": level, "attempts": 4, "successes": hits}
        | dict.fromkeys(("reward", "turns", "tokens", "accepted", "cost"), 0.5)
        for name, level, hits in (("a", 1.0, 4), ("b", 1.0, 2), ("c", 2.0, 0))
    ]
    (run, *_), results = planned_runs(experiment(), PARAMS), Results()
    results.add(run, replace(outcome(0.5), rows=rows, curve=curve([0.0, 0.2, 0.4, 0.6, 0.8])))
    found = {
        **{"panel.pass_at_k.2": (1.0 + 5 / 6 + 0.0) / 3, "panel.difficulty.1": 0.75, "panel.reward": 0.5},
        **{"history.success.first": 0.0, "history.success.last": 0.8, "history.success.mean": 0.4, "panel.success": 0.5},
    }
    for metric, value in found.items():
        required = replace(run, required=(metric,))
        assert results.missing([required]) == []
        assert results.value(run.name, metric) == pytest.approx(value), metric
    for metric in (
        "panel.pass_at_k.8",
        "panel.difficulty.3",
        "history.entropy.mean",
        "report.dead_groups",
        "panel.solutions_differ",
    ):
        assert results.missing([replace(run, required=(metric,))]), metric


def curve(successes: list[float]) -> list[dict[str, Any]]:
    return [
        {"step": step, "environment_steps": 10 * step, "success": success, "reward_mean": success}
        | dict.fromkeys(("entropy", "pair_accuracy", "loss"))
        for step, success in enumerate(successes, start=1)
    ]


def test_tables_are_sorted_and_byte_identical(tmp_path: Path) -> None:
    """Contract: rows and curves of all runs are in two files; equal content gives equal bytes, and dropped runs are removed."""
    row = {"task_id": "a", "cluster": "x", "difficulty": 1.0, "attempts": 2, "successes": 1}
    row |= dict.fromkeys(("reward", "turns", "tokens", "accepted", "cost"), 0.5)
    tables = Tables({"b/10": [row], "b/9": [row], "a/3": [row]}, {"b/9": curve([0.25, 0.5])})
    tables.write(tmp_path, "x")
    rows, curves = (path.read_bytes() for path in paths(tmp_path, "x"))
    loaded = Tables.load(tmp_path, "x")
    assert list(loaded.rows) == ["a/3", "b/9", "b/10"]
    assert loaded.rows["b/9"] == [row]
    assert loaded.curves == tables.curves
    loaded.write(tmp_path, "x")
    assert [path.read_bytes() for path in paths(tmp_path, "x")] == [rows, curves]
    loaded.drop_others({"a/3"})
    loaded.write(tmp_path, "x")
    assert (list(Tables.load(tmp_path, "x").rows), Tables.load(tmp_path, "x").curves) == (["a/3"], {})


def test_a_curve_is_drawn_against_the_steps_played_so_far() -> None:
    """Rows count the environment steps of their training step alone; a step without the column counts all the same."""
    steps = [
        {"step": 1, "environment_steps": 30, "success": 0.25},
        {"step": 2, "environment_steps": 20, "success": None},
        {"step": 3, "environment_steps": 10, "success": 0.5},
    ]
    places, values = curve_of(steps, "success", played=True)
    assert (places.tolist(), values.tolist()) == ([30.0, 60.0], [0.25, 0.5])
    assert curve_of(steps, "success", played=False)[0].tolist() == [1.0, 3.0]
    assert curve_of(steps, "pair_accuracy", played=True)[0].tolist() == []


def test_a_gallery_has_one_number_of_seeds_and_runs_each_arm_with_them() -> None:
    """Contract: an experiment without claims judges nothing; its arms run with the first look's seeds."""
    gallery = experiment(claims=[], looks=[1])
    assert list(gallery.seeds) == [0]
    assert [run.name for run in planned_runs(gallery, PARAMS)] == ["rloo/0", "grpo/0"]
    for looks in ([1, 2], [0]):
        with pytest.raises(ValidationError, match="without claims it is one number of seeds"):
            experiment(claims=[], looks=looks)


def test_the_galleries_show_every_shipped_method() -> None:
    """Contract: each method's page has a learning curve. A new method is a new arm of reports/claims/gallery_*.yaml."""
    galleries = [load_experiment(ROOT / FOLDER / f"{slug}.yaml") for slug in slugs(ROOT) if slug.startswith("gallery_")]
    shown = [arm for gallery in galleries for arm in gallery.arms]
    assert sorted(set(shown)) == sorted(shown)
    assert set(names()) <= set(shown)
    for gallery in galleries:
        for arm, overrides in gallery.arms.items():
            assert overrides.get("rl", {}).get("algorithm", arm) == arm


def test_rows_per_task_are_means_over_attempts() -> None:
    attempts = [
        {"task_id": task, "cluster": "x", "difficulty": 1.0, "success": turns < 3, "turns": turns}
        | dict.fromkeys(("reward", "tokens", "accepted", "cost"), float(turns))
        for task, turns in (("b", 2), ("a", 1), ("b", 5))
    ]
    first, second = task_rows(attempts)
    assert (first["task_id"], first["attempts"], first["successes"], first["turns"]) == ("a", 1, 1, 1.0)
    assert (second["task_id"], second["attempts"], second["successes"], second["turns"]) == ("b", 2, 1, 3.5)


def test_runs_of_other_experiments_are_reused() -> None:
    """Contract: runs with equal parameters and seed are reused, whatever the arm's name, if they have the required metrics."""
    claims = [{**SPEC["claims"][0], "arm": "a", "against": "b"}]
    mine = experiment(arms={"a": {"rl": {"algorithm": "grpo"}}, "b": {}}, claims=claims)
    theirs, there = planned_runs(experiment(), PARAMS), Results(starts={"grpo": 0.3, "rloo": 0.3})
    fill(there, theirs, [0.5], [0.4, 0.6])
    there.tables.curves["grpo/1"] = curve([0.5])
    runs, here = planned_runs(mine, PARAMS), Results()
    assert here.reuse([there], runs) == 4, "GRPO is the default, so arms a and b are both theirs"
    assert [here.value(name, "panel.success") for name in ("a/0", "a/1", "b/1")] == [0.4, 0.6, 0.6]
    assert here.starts == {"a": 0.3, "b": 0.3}
    assert here.tables.curves["b/1"] == curve([0.5])
    assert here.reuse([there], runs) == 0
    other = experiment(claims=[{**SPEC["claims"][0], "metric": "history.success.mean"}])
    assert Results().reuse([there], planned_runs(other, PARAMS)) == 1, "only one run has a curve"


def test_measured_metrics_are_kept_and_shown(tmp_path: Path) -> None:
    """Contract: `measured` metrics are in every run and, as means over seeds, on the page."""
    shown = ["panel.pass_at_k.1", "panel.turns"]
    one = write(tmp_path, measured=shown, claims=NOT_WORSE)
    assert set(shown) < set(metrics_of(one))
    assert one.fixed != experiment().fixed
    runs, results = planned_runs(one, PARAMS, seeds=range(5)), Results()
    for run in runs:
        results.add(run, outcome(0.5, **{"panel.pass_at_k.1": 0.2 + 0.1 * run.seed, "panel.turns": 3.0}))
    write_results(tmp_path, "rloo", one, results)
    text = board_pages(tmp_path)[page_of("rloo")]
    assert "| arm | `panel.pass_at_k.1` | `panel.turns` |" in text
    assert "| `grpo` | 40.0 % | 3 |" in text


def test_metric_missing_in_an_arm_is_a_dash_unless_claimed(tmp_path: Path) -> None:
    """Contract: a claim's metric is required in the runs of its arms; in other arms it may be missing."""
    values = "report.recovered.accuracy"
    arms = {"a": {}, "b": {"rl": {"epochs": 2}}, "c": {"rl": {"epochs": 3}}}
    claims = [{**NOT_WORSE[0], "arm": "a", "against": against} for against in ("b", "c")]
    claims[0] |= {"metric": values, "margin": 0.05}
    one = write(tmp_path, arms=arms, claims=claims, measured=[values])
    assert [set(required_of(one, arm, 0)) for arm in arms] == [{values, "panel.success"}, {values}, {"panel.success"}]
    runs, results = planned_runs(one, PARAMS, seeds=range(5)), Results()
    for run in runs:
        results.add(run, outcome(0.5, **{values: None if run.arm == "c" else 0.75}))
    write_results(tmp_path, "rloo", one, results)
    text = board_pages(tmp_path)[page_of("rloo")]
    assert "| `c` | – |" in text
    assert "| `b` | 0.75 |" in text


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
    monkeypatch.setattr(EvaluationWorkspace, "python", lambda *arguments: None)
    runner, values = CopyingRunner(tmp_path, "c" * 40), {"domains": ["search"]}
    metrics = ["panel.success", "report.recovered.accuracy"]
    found = runner.train_and_evaluate("one", values, metrics, required=["panel.success"]).metrics
    assert found == {"panel.success": 0.5, "report.recovered.accuracy": None}
    assert (runner.folder / "one").exists(), "until its outcome is stored"
    runner.release("one")
    assert not (runner.folder / "one").exists()
    (runner.folder / "one.done").mkdir()  # of a session that was killed while it removed the workspace
    runner.release("one")
    assert not list(runner.folder.iterdir())
    with pytest.raises(RunFailedError, match=r"no metric 'report\.recovered\.accuracy'"):
        runner.train_and_evaluate("other", values, metrics, required=metrics)


RLOO, GRPO = [0.5, 0.6, 0.7, 0.8, 0.9], [0.4, 0.5, 0.6, 0.7, 0.7]
"""Differences 0.1, 0.1, 0.1, 0.1, 0.2: mean 0.12, standard error 0.02."""
NOT_WORSE = [
    {**{key: one for key, one in SPEC["claims"][0].items() if key != "threshold"}, "kind": "non_inferiority", "margin": 0.1}
]


def test_verdict_compares_paired_difference_to_threshold(tmp_path: Path) -> None:
    """One look at five seeds, all of alpha: t(0.975, 4) = 2.776445. p: twice the tail of t(4) beyond 6."""
    one = experiment(looks=[5])
    runs, results = planned_runs(one, PARAMS), Results()
    fill(results, runs, RLOO, GRPO[:4])
    early = report(one, results)["claims"][0]
    assert (early["verdict"], early["looks"], len(early["per_seed"]["grpo"])) == (None, [], 4)
    fill(results, runs, RLOO, GRPO)
    found = report(one, results)
    claim = found["claims"][0]
    assert (claim["verdict"], claim["effect"], claim["seeds"]) == ("reproduced", "better", 5)
    assert claim["difference"] == pytest.approx(0.12)
    assert (claim["low"], claim["high"]) == pytest.approx((0.12 - 0.0555289, 0.12 + 0.0555289), abs=1e-5)
    assert claim["p"] == pytest.approx(0.003883, abs=1e-6)
    assert claim["looks"][0].items() >= {"seeds": 5, "alpha": 0.05, "clusters": 0}.items()
    assert found["cost"] == {"environment_steps": 10100, "seconds": 20.0}
    assert found["commits"] == ["c" * 40]
    assert {"arms", "looks", "budget", "environment", "fixed", "family"} <= set(found)


def test_rows_of_one_panel_add_the_error_over_clusters(tmp_path: Path) -> None:
    """Contract: the error is over seeds and clusters if every run has rows on one panel, and over seeds alone if a run lacks them
    or differs."""
    one = experiment(looks=[5])
    runs, results = planned_runs(one, PARAMS), Results()

    def rows(run: Any, task: str = "t") -> list[dict[str, Any]]:
        hits = (run.seed + (run.arm == "rloo")) % 3
        values = dict.fromkeys(("reward", "turns", "tokens", "accepted", "cost"), 0.0)
        of = [{"task_id": f"{task}{n}", "cluster": f"c{n % 5}", "difficulty": 1.0, "attempts": 2} | values for n in range(10)]
        return [{**row, "successes": (n + hits) % 3} for n, row in enumerate(of)]

    for run in runs:
        results.add(run, replace(outcome(0.5), rows=rows(run)))
    assert report(one, results)["claims"][0]["looks"][0]["clusters"] == 5
    results.tables.rows["grpo/3"] = rows(runs[0], "other")
    assert report(one, results)["claims"][0]["looks"][0]["clusters"] == 0
    del results.tables.rows["grpo/3"]
    assert report(one, results)["claims"][0]["looks"][0]["clusters"] == 0


def test_exploratory_claim_needs_fresh_seeds() -> None:
    """Contract: an exploratory claim is not reproduced by seeds that were already seen; the fresh ones decide it."""
    results, numbers = Results(), (*RLOO, *RLOO)
    fill(results, planned_runs(experiment(), PARAMS), list(numbers), [*GRPO, *(0.9 for _ in range(5))])
    found = {
        fresh: report(experiment(looks=[5], claims=[{**SPEC["claims"][0], "exploratory": True, "fresh_from": fresh}]), results)
        for fresh in (0, 5)
    }
    first, fresh = (found[of]["claims"][0] for of in (0, 5))
    assert (first["effect"], first["verdict"], first["looks"][0]["verdict"]) == ("better", "undecided", "reproduced")
    assert (fresh["effect"], fresh["verdict"], fresh["per_seed"]["grpo"]) == ("worse", "not reproduced", [0.9] * 5)


def save_outcomes(root: Path, rloo: list[float], grpo: list[float], **changes: Any) -> None:
    one = write(root, **{"looks": [5], **changes})
    results = Results(starts={"rloo": 0.31, "grpo": 0.31})
    fill(results, planned_runs(one, PARAMS), rloo, grpo)
    write_results(root, "rloo", one, results)


def test_board_pages_are_made_from_the_result_files(tmp_path: Path) -> None:
    save_outcomes(tmp_path, RLOO, GRPO)
    write(tmp_path, "zzz", method="Other")
    pages = board_pages(tmp_path)
    index, page = pages[PAGE], pages[page_of("rloo")]
    reproduced = "RLOO is better than GRPO. | **reproduced** | better | +12.0 points (+6.4 to +17.6) |"
    assert f"| {reproduced} 5 | 0.004 | **0.004** |" in index
    assert "| **[RLOO](rloo.md)** (search; 10k environment steps, 20 s) |" in index
    assert "| **[Other](zzz.md)** (search; not run yet) |" in index
    assert "keeps **1 of 1** differences" in index
    assert "| Policy optimisation | 1 | 0 | 0 | 0 | 1 | 2 |" in index
    assert f"| 1 | {reproduced} at least +2.0, margin 5.0 | 5 | 0.004 | **0.004** |" in page
    assert "| 1 | RLOO is better than GRPO. | not judged yet | – | – |" in pages[page_of("zzz")]
    assert "This experiment is not run yet." in pages[page_of("zzz")]
    assert "`rloo`: 50.0, 60.0, 70.0, 80.0, 90.0 | `grpo`: 40.0, 50.0, 60.0, 70.0, 70.0" in page
    assert "`rl.algorithm: rloo` | 31.0 %" in page
    assert "Cost: 10k environment steps, 20 s; commit `cccccccccccc`." in page
    assert "10 of 10 runs are of older code" in page
    assert "Intervals are over seeds alone" in page
    assert board_pages(tmp_path) == pages


def test_board_marks_unfinished_and_outdated_results(tmp_path: Path) -> None:
    save_outcomes(tmp_path, [0.5, 0.6], [0.4])
    assert board_rows(tmp_path)[0].state == "1 of 5 seeds"
    write(tmp_path, looks=[6])
    assert board_rows(tmp_path)[0].state == OUTDATED
    assert board_rows(tmp_path)[0].difference == "–"


def test_claim_that_is_not_reproduced_requires_checked_and_world(tmp_path: Path) -> None:
    """`checked` is added after the result and does not make it another experiment."""
    save_outcomes(tmp_path, GRPO, RLOO)
    with pytest.raises(ParamsError, match=r"rloo\.yaml: claim 1 was not reproduced.*'checked' and 'world'"):
        board_pages(tmp_path)
    checked = [{**SPEC["claims"][0], "checked": "advantages against tests/x.py", "world": "No: one turn."}]
    write(tmp_path, claims=checked, looks=[5])
    page = board_pages(tmp_path)[page_of("rloo")]
    assert "| **not reproduced** |" in page
    assert "- Claim 1: advantages against tests/x.py." in page
    assert "- Claim 1: No: one turn." in page


def test_differences_of_other_metrics_keep_their_unit(tmp_path: Path) -> None:
    claims = [{**SPEC["claims"][0], "metric": "panel.cost", "threshold": 0.0, "margin": 0.1}]
    save_outcomes(tmp_path, [0.5, 0.6, 0.5, 0.6, 0.5], [0.6, 0.5, 0.6, 0.5, 0.4], claims=claims)
    row = board_rows(tmp_path)[0]
    assert row.signed(-1.25) == "−1.25"
    assert row.signed(-4650.0) == "−4,650"


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


def test_a_run_of_lane_control_finds_its_advisers_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: it is linked into the workspace that the lane's runs share before the run starts."""
    (tmp_path / "data/pretrained/m").mkdir(parents=True)
    (tmp_path / "data/pretrained/m/config.json").write_text("{}")
    workspace = EvaluationWorkspace(tmp_path / "shared")
    workspace.folder.mkdir()
    runner = ExperimentRunner(tmp_path, "c" * 40, program="text_grid")
    monkeypatch.setattr(runner, "_shared_workspace", lambda common: workspace)
    monkeypatch.setattr(ExperimentRunner, "code", "0" * 16)

    def play(own: EvaluationWorkspace, command: list[str], threads: int) -> None:
        assert (own.folder / "data/pretrained/m/config.json").exists()
        result = own.folder / command[command.index("--result") + 1]
        result.write_text('{"environment_steps": 3, "control.return": 2.0}')

    monkeypatch.setattr(EvaluationWorkspace, "python", play)
    advised = {"decision": {"kind": "model", "model": "data/pretrained/m"}}
    assert runner.measure("run", advised, {}, ["control.return"]).metrics == {"control.return": 2.0}


def test_every_shipped_experiment_is_valid_and_in_dvc_yaml() -> None:
    """Overrides that no longer fit params.yaml fail here, not hours into `make claims`."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    for slug in slugs(ROOT):
        path = ROOT / FOLDER / f"{slug}.yaml"
        check_environments(check_experiment(load_experiment(path), params, str(path)), str(path))
    pipeline = yaml.safe_load((ROOT / FOLDER / "dvc.yaml").read_text(encoding="utf-8"))["stages"]["claim"]
    assert pipeline["matrix"]["method"] == slugs(ROOT)


def test_unknown_experiment_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["claim", "lite-ppo"])
    assert stage.main() == 2
    assert "unknown experiment lite-ppo" in capsys.readouterr().err


OFFLINE: dict[str, Any] = {
    **{name: SPEC[name] for name in ("method", "paper", "switch", "family")},
    "lane": "control",
    "environment": "guessing",
    "shared": {"updates": 5, "head": {"v_min": -6.0, "v_max": 2.0}},
    "arms": {"mse": {"head": {"loss": "mse"}}, "hl_gauss": {"noise": 0.3}},
    "claims": [{"says": "x", "arm": "hl_gauss", "against": "mse", "metric": "offline.win_rate"}],
}
CHOICE: dict[str, Any] = {
    **{name: SPEC[name] for name in ("method", "paper", "switch", "environment", "family")},
    "lane": "annotate",
    "start": "own",
    "shared": {"annotate": {"q_model": {"kind": "step_dpo"}}},
    "arms": {"plain": {}, "q": {"evaluate": {"models": ["sft+q"]}}},
    "claims": [{"says": "x", "arm": "q", "against": "plain"}],
}


def test_offline_lane_has_its_own_settings() -> None:
    """Contract: arms override the lane's settings and nothing of params.yaml; each run has its seed; an invalid key names its
    arm."""
    one = Experiment.model_validate(OFFLINE)
    check_experiment(one, PARAMS, "x.yaml")
    runs = planned_runs(one, PARAMS)
    assert [run.name for run in runs[:3]] == ["mse/0", "hl_gauss/0", "mse/1"]
    assert runs[2].values == {"updates": 5, "head": {"v_min": -6.0, "v_max": 2.0, "loss": "mse"}, "seed": 1}
    assert [run.key for run in planned_runs(one, {**PARAMS, "rl": {"learning_rate": 9.0}})] == [run.key for run in runs]
    assert "offline.win_rate" in metrics_of(one)
    bad = Experiment.model_validate({**OFFLINE, "arms": {"mse": {"updates": 0}, "hl_gauss": {}}})
    with pytest.raises(ParamsError, match=r"x\.yaml: arm 'mse'.*updates.*greater than or equal to 1"):
        check_experiment(bad, PARAMS, "x.yaml")


def test_annotate_lane_evaluates_sft_and_seeds_all_stages() -> None:
    """Contract: the SFT policy plays unless the arm says how it chooses; the seed is also that of SFT and trees."""
    one = Experiment.model_validate(CHOICE)
    check_experiment(one, PARAMS, "x.yaml")
    plain, q = (run_values(one, arm, 2, PARAMS) for arm in ("plain", "q"))
    assert (plain["evaluate"]["models"], q["evaluate"]["models"]) == (["sft"], ["sft+q"])
    assert (plain["seed"], plain["rl"].get("seed")) == (2, None)
    assert start_values(plain) != start_values(run_values(one, "plain", 3, PARAMS))


def test_offline_methods_have_steps_instead_of_a_budget() -> None:
    """Contract: no budget ends these runs, and an arm may take fewer steps than the others."""
    values = {**SPEC, "budget": None, "shared": {"rl": {"algorithm": "stored_pg", "steps": 40}}}
    one = Experiment.model_validate({**values, "arms": {"rloo": {"rl": {"algorithm": "b_coder"}}, "grpo": {"rl": {"steps": 9}}}})
    sections = [run_values(one, arm, 0, PARAMS)["rl"] for arm in ("rloo", "grpo")]
    assert [rl["steps"] for rl in sections] == [40, 9]
    assert all(rl.get("environment_steps") is None for rl in sections)
    check_experiment(one, PARAMS, "here")


def test_rl_arm_may_choose_the_evaluated_model() -> None:
    one = experiment(arms={"rloo": {}, "grpo": {"evaluate": {"models": ["rl@search+logprob"]}}})
    assert arm_values(one, "rloo", PARAMS)["evaluate"]["models"] == ["rl@search"]
    assert arm_values(one, "grpo", PARAMS)["evaluate"]["models"] == ["rl@search+logprob"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**OFFLINE, "budget": {"environment_steps": 5}}, "lane control plays no episodes"),
        ({**CHOICE, "environment": "guessing"}, "lane control, and no other, has guessing"),
        ({**SPEC, "budget": None}, "it ends the runs of lane rl"),
    ],
)
def test_settings_of_other_lanes_are_rejected(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate(changes)


def test_unset_keys_do_not_change_the_digest() -> None:
    """Contract: only the keys that an experiment sets are hashed, so results stay valid when the format gets another key."""
    claim = {key: one for key, one in SPEC["claims"][0].items() if key != "says"} | {"margin": 0.05}
    values = {key: SPEC[key] for key in ("environment", "budget", "shared", "arms")}
    assert experiment().fixed == digest({**values, "claims": [claim]})


def test_rewording_a_claim_keeps_its_results() -> None:
    claim = SPEC["claims"][0]
    reworded = experiment(method="Another title", claims=[{**claim, "says": "Reworded.", "checked": "By hand.", "world": "Yes."}])
    assert reworded.fixed == experiment().fixed
    assert experiment(claims=[{**claim, "threshold": 0.07}]).fixed != experiment().fixed


def test_board_describes_the_runs_of_a_lane(tmp_path: Path) -> None:
    for slug, values in (("offline", OFFLINE), ("choice", CHOICE)):
        path = tmp_path / FOLDER / f"{slug}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    page = "\n".join(board_pages(tmp_path).values())
    assert f"looks at 8, 12, 20 paired seeds, {PROBLEMS['guessing'].random}." in page
    assert "overrides of stages/control/settings.py" in page
    assert LANES["annotate"] in page
