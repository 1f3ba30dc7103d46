"""The claims board: experiments fixed before the run, resumable runs, verdicts, and pages made from the result files."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.claims import __main__ as stage
from stages.claims.experiment import (
    FOLDER,
    Experiment,
    arm_values,
    check_environments,
    check_experiment,
    digest,
    load_experiment,
    run_values,
    slugs,
    start_values,
)
from stages.claims.results import Results, metrics_of, planned_runs, required_of, result_path
from stages.claims.runner import ExperimentRunner, clean_commit, read_metric
from stages.params import ROOT
from stages.reporting import board
from stages.runtime.validation import ParamsError
from stages.runtime.workspace import EvaluationWorkspace, RunFailedError

SPEC: dict[str, Any] = {
    "method": "RLOO",
    "paper": "arXiv 2402.14740",
    "switch": "rl.algorithm: rloo",
    "environment": "search",
    "seeds": [0, 1, 2, 3, 4],
    "budget": {"environment_steps": 1000},
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
    return load_experiment(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [0, 1, 2, 3]}, r"seeds.*at least 5"),
        ({"seeds": [0, 1, 2, 3, 3]}, "lists a seed twice"),
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


def outcome(run: Any, success: float) -> dict[str, Any]:
    metrics = dict.fromkeys(metrics_of(experiment()), success)
    return {"metrics": metrics, "environment_steps": 1010, "seconds": 2.0, "commit": "c" * 40, "key": run.key}


def fill(results: Results, runs: list, rloo: list[float], grpo: list[float]) -> None:
    for run in runs:
        values = {"rloo": rloo, "grpo": grpo}[run.arm]
        if run.seed < len(values):
            results.outcomes[run.name] = outcome(run, values[run.seed])


def test_finished_runs_are_kept_unless_parameters_change(tmp_path: Path) -> None:
    one = experiment()
    runs, results, path = planned_runs(one, PARAMS), Results(), tmp_path / "x.json"
    assert [run.name for run in runs[:3]] == ["rloo/0", "grpo/0", "rloo/1"], "seed by seed"
    fill(results, runs, [0.5, 0.5, 0.5], [0.4])
    results.write(path, one)
    loaded = Results.load(path)
    assert [run.name for run in loaded.missing(runs)] == ["grpo/1", "grpo/2", "rloo/3", "grpo/3", "rloo/4", "grpo/4"]
    faster = planned_runs(one, {**PARAMS, "resources": {"device": "cpu", "threads": 64, "slots": 8}, "report": {"episodes": 1}})
    assert len(loaded.missing(faster)) == 6, "resources and report are not part of a run"
    spelled = planned_runs(one, {**PARAMS, "sft": {"epochs": 4.0}, "rl": {**PARAMS["rl"], "credit": {"key": None}}})
    assert len(loaded.missing(spelled)) == 6, "nor are explicit defaults"
    other = planned_runs(one, {**PARAMS, "rl": {"learning_rate": 0.002}})
    assert len(loaded.missing(other)) == 10
    loaded.drop_others(other)
    assert loaded.outcomes == {}


def test_runs_of_other_experiments_are_reused() -> None:
    """Contract: runs with equal parameters, seed and metrics are reused, whatever the arm's name; other metrics make another
    run."""
    claims = [{**SPEC["claims"][0], "arm": "a", "against": "b"}]
    mine = experiment(arms={"a": {"rl": {"algorithm": "grpo"}}, "b": {}}, claims=claims)
    theirs, there = planned_runs(experiment(), PARAMS), Results(starts={"grpo": 0.3, "rloo": 0.3})
    fill(there, theirs, [0.5], [0.4, 0.6])
    runs, here = planned_runs(mine, PARAMS), Results()
    assert here.reuse([there], runs) == 4, "GRPO is the default, so arms a and b are both theirs"
    assert [here.outcomes[name]["metrics"]["panel.success"] for name in ("a/0", "a/1", "b/1")] == [0.4, 0.6, 0.6]
    assert here.starts == {"a": 0.3, "b": 0.3}
    assert here.reuse([there], runs) == 0
    other = experiment(claims=[{**SPEC["claims"][0], "metric": "history.success.mean"}])
    assert Results().reuse([there], planned_runs(other, PARAMS)) == 0


def test_measured_metrics_are_kept_and_shown(tmp_path: Path) -> None:
    """Contract: `measured` metrics are in every run and, as means over seeds, on the page."""
    shown = ["panel.pass_at_k.1", "panel.turns"]
    one = write(tmp_path, measured=shown, claims=[{**SPEC["claims"][0], "threshold": -0.1}])
    assert set(shown) < set(metrics_of(one))
    assert one.fixed != experiment().fixed
    runs, results = planned_runs(one, PARAMS), Results()
    for run in runs:
        metrics = {"panel.success": 0.5, "panel.pass_at_k.1": 0.2 + 0.1 * run.seed, "panel.turns": 3.0}
        results.outcomes[run.name] = {**outcome(run, 0.5), "metrics": metrics}
    results.write(result_path(tmp_path, "rloo"), one)
    text = board.pages(tmp_path)[board.page_of("rloo")]
    assert "| arm | `panel.pass_at_k.1` | `panel.turns` |" in text
    assert "| `grpo` | 40.0 % | 3 |" in text


def test_metric_missing_in_an_arm_is_a_dash_unless_claimed(tmp_path: Path) -> None:
    """Contract: a claim's metric is required in the runs of its arms; in other arms it may be missing."""
    values = "report.recovered.accuracy"
    arms = {"a": {}, "b": {"rl": {"epochs": 2}}, "c": {"rl": {"epochs": 3}}}
    claims = [{**SPEC["claims"][0], "arm": "a", "against": against, "threshold": -0.1} for against in ("b", "c")]
    claims[0]["metric"] = values
    one = write(tmp_path, arms=arms, claims=claims, measured=[values])
    needed = {arm: set(required_of(one, arm)) for arm in arms}
    assert values in needed["a"] & needed["b"]
    assert needed["c"] == {"panel.success", "panel.turns", "panel.cost", "panel.tokens"}
    runs, results = planned_runs(one, PARAMS), Results()
    for run in runs:
        metrics = {**dict.fromkeys(metrics_of(one), 0.5), values: None if run.arm == "c" else 0.75}
        results.outcomes[run.name] = {**outcome(run, 0.5), "metrics": metrics}
    results.write(result_path(tmp_path, "rloo"), one)
    text = board.pages(tmp_path)[board.page_of("rloo")]
    assert "| `c` | – |" in text
    assert "| `b` | 0.75 |" in text


class CopyingRunner(ExperimentRunner):
    """Runs whose stages have already written their reports."""

    def start(self, values: Any) -> EvaluationWorkspace:
        folder = self.root / "start"
        (folder / "reports/rl").mkdir(parents=True, exist_ok=True)
        found = {"success": {"mean": 0.5}}
        (folder / "reports/evaluation.json").write_text(json.dumps({"models": {"rl@search": {"search": found}}}))
        (folder / "reports/rl/search.json").write_text(json.dumps({"environment_steps": 9}))
        return EvaluationWorkspace(folder)


def test_run_without_a_required_metric_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvaluationWorkspace, "python", lambda *arguments: None)
    runner, values = CopyingRunner(tmp_path, "c" * 40), {"domains": ["search"]}
    metrics = ["panel.success", "report.recovered.accuracy"]
    found = runner.train_and_evaluate("one", values, metrics, required=["panel.success"])["metrics"]
    assert found == {"panel.success": 0.5, "report.recovered.accuracy": None}
    with pytest.raises(RunFailedError, match=r"no metric 'report\.recovered\.accuracy'"):
        runner.train_and_evaluate("other", values, metrics, required=metrics)


def test_verdict_compares_paired_difference_to_threshold(tmp_path: Path) -> None:
    """Differences 0.1, 0.1, 0.1, 0.1, 0.2: mean 0.12, standard error 0.02, t(0.975, 4) = 2.776445."""
    one = experiment()
    runs, results = planned_runs(one, PARAMS), Results()
    fill(results, runs, [0.5, 0.6, 0.7, 0.8, 0.9], [0.4, 0.5, 0.6, 0.7])
    assert results.report(one)["claims"][0]["verdict"] is None
    assert results.report(one)["claims"][0]["per_seed"]["grpo"][-1] is None
    fill(results, runs, [0.5, 0.6, 0.7, 0.8, 0.9], [0.4, 0.5, 0.6, 0.7, 0.7])
    report = results.report(one)
    claim = report["claims"][0]
    assert claim["verdict"] == "reproduced"
    assert claim["difference"] == pytest.approx(0.12)
    assert (claim["low"], claim["high"]) == pytest.approx((0.12 - 0.0555289, 0.12 + 0.0555289), abs=1e-5)
    assert report["cost"] == {"environment_steps": 10100, "seconds": 20.0}
    assert report["commits"] == ["c" * 40]
    assert {"arms", "seeds", "budget", "environment", "fixed"} <= set(report)


def write_results(root: Path, rloo: list[float], grpo: list[float], **changes: Any) -> None:
    one = write(root, **changes)
    results = Results(starts={"rloo": 0.31, "grpo": 0.31})
    fill(results, planned_runs(one, PARAMS), rloo, grpo)
    results.write(result_path(root, "rloo"), one)


def test_board_pages_are_made_from_the_result_files(tmp_path: Path) -> None:
    write_results(tmp_path, [0.5, 0.6, 0.7, 0.8, 0.9], [0.4, 0.5, 0.6, 0.7, 0.7])
    write(tmp_path, "zzz", method="Other")
    pages = board.pages(tmp_path)
    index, page = pages[board.PAGE], pages[board.page_of("rloo")]
    assert "| [RLOO](rloo.md) | arXiv 2402.14740 | `rl.algorithm: rloo` | 1 reproduced |" in index
    assert "| [Other](zzz.md) | arXiv 2402.14740 | `rl.algorithm: rloo` | 1 not run yet |" in index
    assert "| RLOO is better than GRPO. | **reproduced** | +12.0 points (+6.4 to +17.6) |" in page
    assert "| not run yet | – |" in pages[board.page_of("zzz")]
    assert "`rloo`: 50.0, 60.0, 70.0, 80.0, 90.0 | `grpo`: 40.0, 50.0, 60.0, 70.0, 70.0" in page
    assert "`rl.algorithm: rloo` | 31.0 %" in page
    assert "10,100 environment steps" in page
    assert board.pages(tmp_path) == pages


def test_board_marks_unfinished_and_outdated_results(tmp_path: Path) -> None:
    write_results(tmp_path, [0.5, 0.6], [0.4])
    assert board.rows(tmp_path)[0].state == "running: 3 of 10 runs"
    write(tmp_path, seeds=[0, 1, 2, 3, 5])
    assert board.rows(tmp_path)[0].state == board.OUTDATED
    assert board.rows(tmp_path)[0].difference == "–"


def test_claim_that_is_not_reproduced_requires_checked(tmp_path: Path) -> None:
    """`checked` is added after the result and does not make it another experiment."""
    numbers = ([0.4, 0.4, 0.4, 0.4, 0.4], [0.5, 0.5, 0.5, 0.5, 0.5])
    write_results(tmp_path, *numbers)
    with pytest.raises(ParamsError, match=r"rloo\.yaml: claim 1 was not reproduced.*'checked'"):
        board.pages(tmp_path)
    checked = [{**SPEC["claims"][0], "checked": "advantages against tests/x.py"}]
    write(tmp_path, claims=checked)
    page = board.pages(tmp_path)[board.page_of("rloo")]
    assert "| **not reproduced** |" in page
    assert "- RLOO is better than GRPO. advantages against tests/x.py" in page


def test_differences_of_other_metrics_keep_their_unit(tmp_path: Path) -> None:
    claims = [{**SPEC["claims"][0], "metric": "panel.cost", "threshold": 0.0}]
    write_results(tmp_path, [0.5, 0.6, 0.5, 0.6, 0.5], [0.6, 0.5, 0.6, 0.5, 0.5], claims=claims)
    row = board.rows(tmp_path)[0]
    assert row.number(-1.25) == "−1.25"


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


class FakeRunner(ExperimentRunner):
    """Runs no stages; an arm's success grows with the seed, and one run may fail."""

    failing: str = ""
    played: list[str]

    def start_success(self, values: Any) -> float:
        return 0.25

    def train_and_evaluate(self, name: str, values: Any, metrics: Any, trains: bool = True, required: Any = ()) -> dict[str, Any]:
        arm = name.split("-")[1]
        self.played.append(f"{arm}/{values['rl']['seed']}")
        if self.failing == self.played[-1]:
            raise RunFailedError("no room left")
        success = 0.1 * values["rl"]["seed"] + (0.2 if arm == "rloo" else 0.0)
        return {"metrics": dict.fromkeys(metrics, success), "environment_steps": 9, "seconds": 1.0, "commit": self.commit}


def test_failed_run_keeps_the_others_and_is_retried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path)
    runner = FakeRunner(tmp_path, "c" * 40)
    runner.played, runner.failing = [], "grpo/2"
    assert stage.one_experiment(tmp_path, "rloo", one, PARAMS, runner, jobs=2) == 1
    assert len(runner.played) == 10
    assert "grpo/2 failed: no room left" in capsys.readouterr().err
    assert json.loads(result_path(tmp_path, "rloo").read_text())["claims"][0]["verdict"] is None
    runner.played, runner.failing = [], ""
    assert stage.one_experiment(tmp_path, "rloo", one, PARAMS, runner, jobs=2) == 0
    assert runner.played == ["grpo/2"]
    report = json.loads(result_path(tmp_path, "rloo").read_text())
    assert report["claims"][0]["verdict"] == "reproduced"
    assert report["start"] == {"grpo": 0.25, "rloo": 0.25}


def test_interrupt_starts_no_further_runs() -> None:
    """Contract: after Ctrl-C the runs in progress finish and no others start."""
    started, ended = [], threading.Event()

    def play(run: str) -> dict[str, Any]:
        started.append(run)
        if run != "first":
            ended.wait(60)
        return {}

    results = stage.outcomes(["first", "second", "third", "fourth"], play, jobs=2)  # type: ignore[list-item]
    assert next(results) == ("first", {})
    threading.Timer(0.2, ended.set).start()
    results.close()
    assert "fourth" not in started


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
    **{name: SPEC[name] for name in ("method", "paper", "switch", "seeds")},
    "lane": "offline_q",
    "environment": "guessing",
    "shared": {"updates": 5, "head": {"v_min": -6.0, "v_max": 2.0}},
    "arms": {"mse": {"head": {"loss": "mse"}}, "hl_gauss": {"noise": 0.3}},
    "claims": [{"says": "x", "arm": "hl_gauss", "against": "mse", "metric": "offline.win_rate"}],
}
CHOICE: dict[str, Any] = {
    **{name: SPEC[name] for name in ("method", "paper", "switch", "environment", "seeds")},
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
        ({**OFFLINE, "budget": {"environment_steps": 5}}, "lane offline_q plays no episodes"),
        ({**CHOICE, "environment": "guessing"}, "lane offline_q, and no other, plays"),
        ({**SPEC, "budget": None}, "it ends the runs of lane rl"),
    ],
)
def test_settings_of_other_lanes_are_rejected(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate(changes)


def test_optional_keys_do_not_change_the_digest() -> None:
    """Contract: results of experiments without `lane` or `measured` stay valid."""
    values = experiment().model_dump(mode="json")
    for one in values["claims"]:
        del one["says"], one["checked"]
    for name in ("method", "paper", "switch", "lane", "measured"):
        del values[name]
    assert experiment().fixed == digest(values)


def test_rewording_a_claim_keeps_its_results() -> None:
    claim = SPEC["claims"][0]
    reworded = experiment(method="Another title", claims=[{**claim, "says": "Reworded.", "checked": "By hand."}])
    assert reworded.fixed == experiment().fixed
    assert experiment(claims=[{**claim, "threshold": 0.07}]).fixed != experiment().fixed


def test_board_describes_the_runs_of_a_lane(tmp_path: Path) -> None:
    for slug, values in (("offline", OFFLINE), ("choice", CHOICE)):
        path = tmp_path / FOLDER / f"{slug}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    page = "\n".join(board.pages(tmp_path).values())
    assert f"5 paired seeds, {board.LANES['offline_q']}." in page
    assert "overrides of stages/control/settings.py" in page
    assert board.LANES["annotate"] in page
