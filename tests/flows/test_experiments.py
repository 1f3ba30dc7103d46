"""Settings compared through DVC experiments on a small project of the lifecycle's structure; budgets by hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import flows  # noqa: F401  (configures Prefect, so it comes before Prefect's import)
from flows.experiments import RUN_FOLDERS, RUN_INFOS, remove_leftovers
from flows.pipeline import run_stage
from flows.process import ROOT, StageFailedError

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(40)]
DVC_YAML = """
stages:
  evaluate:
    cmd: python evaluate.py
    deps: [evaluate.py]
    params: [rl, evaluate, resources, per_domain]
    outs: [data/rows.parquet]
    metrics:
      - reports/evaluation.json: {cache: false}
"""
PARAMS = """
domains: [a, b]
resources: {device: cpu, threads: 2, workers: 2}
rl: {algorithm: grpo, seed: null, steps: 3}
evaluate: {models: null}
per_domain: {a: {rl: {steps: 40}}, b: {rl: {}}}
"""
EVALUATE = """
import json, os, pathlib, yaml
params = yaml.safe_load(open("params.yaml"))
rl = params["rl"]
if rl["algorithm"] == "broken":
    raise SystemExit("no such algorithm")
value = {"grpo": 0.2, "rloo": 0.5}[rl["algorithm"]] + 0.01 * rl["seed"]
models = {f"rl@{d}": {d: {"success": {"mean": value + 0.1 * i}}} for i, d in enumerate(params["domains"])}
steps = {d: params["per_domain"][d]["rl"].get("steps", rl["steps"]) for d in params["domains"]}
identity = [os.environ[name] for name in ("LIFECYCLE_RUN_ID", "LIFECYCLE_RUN_NAME")]
written = {"models": models, "evaluated": params["evaluate"]["models"], "steps": steps, "threads": params["resources"]["threads"]}
written["identity"] = identity
pathlib.Path("reports").mkdir(exist_ok=True)
pathlib.Path("reports/evaluation.json").write_text(json.dumps(written))
pathlib.Path("data").mkdir(exist_ok=True)
pathlib.Path("data/rows.parquet").write_text(rl["algorithm"])
pathlib.Path("runs.log").open("a").write("ran")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experiments")
    for name, text in (("dvc.yaml", DVC_YAML), ("params.yaml", PARAMS), ("evaluate.py", EVALUATE)):
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    for key, value in (("user.name", "a"), ("user.email", "a@b.c")):
        subprocess.run(["git", "config", key, value], cwd=root, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    subprocess.run(["git", "commit", "--quiet", "-m", "start"], cwd=root, check=True)
    return root


@pytest.mark.slow
def test_parallel_experiments_give_table_and_figure(checkout: Path) -> None:
    """Parallel runs leave the checkout unchanged, and each becomes an experiment with its own name."""
    from flows.compare import Comparison, Setting, gather_scores, plan_experiments, verdicts, write
    from flows.experiments import find, output, results, run_experiment

    def status() -> set[str]:
        done = subprocess.run(["git", "status", "--porcelain"], cwd=checkout, capture_output=True, text=True, check=True)
        return set(done.stdout.splitlines())

    settings = {name: Setting(overrides=[f"rl.algorithm={name}", "rl.steps=7"]) for name in ("grpo", "rloo")}
    comparison = Comparison(name="two", settings=settings, seeds=[0, 4], jobs=2)
    plan, before = plan_experiments(comparison, checkout, settings, comparison.seeds), status()
    assert list(plan) == [("grpo", 0), ("rloo", 0), ("grpo", 4), ("rloo", 4)]
    with ThreadPoolExecutor(2) as pool:
        ran = list(pool.map(lambda run: run_experiment(checkout, *run, echo=lambda line: None), plan.values()))
    assert ran == [True] * 4
    assert status() == before
    name = plan["grpo", 0][0]
    assert not run_experiment(checkout, name, [], echo=lambda line: None), "an existing experiment is not run again"

    found = results(checkout, name)
    assert found["evaluated"] == ["rl@a", "rl@b"]
    assert found["identity"] == [name, name], "MLflow shows the run under the experiment's name"
    assert found["steps"] == {"a": 7, "b": 7}, "an override also replaces a value of a single domain"
    assert found["threads"] == 1
    assert output(checkout, name, "data/rows.parquet") == b"grpo"
    with pytest.raises(StageFailedError, match=r"has no data/none\.parquet in DVC's cache .* 'dvc exp remove two-grpo-0-"):
        output(checkout, name, "data/none.parquet")
    assert find(checkout, "two-nothing") is None
    with pytest.raises(StageFailedError, match="no experiment"):
        results(checkout, "two-nothing")

    scores = gather_scores(comparison, checkout, plan)
    assert scores["grpo"] == [pytest.approx([0.2, 0.3]), pytest.approx([0.24, 0.34])]
    path = write(comparison, checkout, scores, plan)
    table = path.with_suffix(".md").read_text()
    assert "| `rloo` | " in table
    assert "1.000 (1.000 to 1.000)" in table, "every run of rloo beats every run of grpo"
    assert "seeds alone" in table, "the runs have no rows per task"
    assert verdicts(path) == {"rloo": "undecided"}
    assert (checkout / "reports/comparisons/two.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_failed_experiment_error_quotes_the_stage(checkout: Path) -> None:
    from flows.experiments import run_experiment

    with pytest.raises(StageFailedError, match=r"(?s)experiment bad failed.*no such algorithm"):
        run_experiment(checkout, "bad", ["rl.algorithm=broken"], echo=lambda line: None)


def test_experiment_name_depends_on_overrides_and_tree() -> None:
    from flows.experiments import experiment_name

    one = experiment_name("Two-GRPO + x-0", ["a=1"], "s")
    assert one.startswith("two-grpo-x-0-")
    assert len({one, experiment_name("Two-GRPO + x-0", ["a=2"], "s"), experiment_name("Two-GRPO + x-0", ["a=1"], "t")}) == 3


def test_scores_of_named_and_missing_models() -> None:
    from flows.compare import Setting, scores_of

    models: dict[str, Any] = {"sft": {"a": {"success": {"mean": 0.25}}}}
    assert scores_of({"models": models}, Setting(model="sft"), "success", ["a"]) == [0.25]
    with pytest.raises(StageFailedError, match="no success of model specialist"):
        scores_of({"models": models}, Setting(), "success", ["a"])


def test_budgets_by_hand() -> None:
    """60 demonstrations of 10 units and 400 episodes are 1000 units; 500 episodes are too many."""
    from flows.budget import Budget, Split, comparison_of

    mixed, other = Split(demos=60, episodes=400), Split(demos=0, episodes=1000)
    budget = Budget(total_units=1000, splits=[mixed, other], overrides=["rl.group_size=4"])
    with pytest.raises(ValueError, match=r"60 demonstrations .*500 episodes .*1100 units.*1000"):
        Budget(total_units=1000, splits=[Split(demos=60, episodes=500), other])
    with pytest.raises(ValueError, match="exceed the budget"):
        budget.split(101)
    assert budget.split(100) == Split(demos=100, episodes=0)
    settings = comparison_of(budget, {"domains": ["a"], "rl": {"tasks_per_step": 10, "group_size": 8}}).settings
    assert settings["60 demos + 400 episodes"].overrides == ["rl.group_size=4", "sft.demonstrations=60", "rl.steps=10"]
    assert settings["0 demos + 1000 episodes"].overrides[1:] == ["sft.demonstrations=0", "rl.steps=25"]
    assert [split.demos for split in Budget(total_units=1000).splits] == [0, 25, 50, 100]


def test_a_domains_own_step_size_gives_its_own_number_of_steps() -> None:
    """640 episodes: 5 steps of 16 x 8; 20 of a's 8 x 4; with rl.group_size=2, which a's own replaces too, 20 of 16 x 2 and 40 of
    8 x 2."""
    from flows.budget import Budget, Split, comparison_of

    params = {"domains": ["a", "b"], "per_domain": {"a": {"rl": {"tasks_per_step": 8, "group_size": 4}}, "b": {}}}
    splits = [Split(demos=0, episodes=640), Split(demos=64, episodes=0)]
    for overrides, steps in (([], (5, 20)), (["rl.group_size=2"], (20, 40))):
        setting = comparison_of(Budget(total_units=640, splits=splits, overrides=overrides), params).settings
        spent = setting["0 demos + 640 episodes"].overrides[len(overrides) + 1 :]
        assert spent == [f"rl.steps={steps[0]}", f"per_domain.a.rl.steps={steps[1]}"]


def test_split_without_episodes_scores_the_sft_policy() -> None:
    from flows.budget import Split, setting_of

    splits = Split(demos=100, episodes=0), Split(demos=0, episodes=640)
    only_sft, only_rl = (setting_of(split, [], {"": 128}) for split in splits)
    assert only_sft.model == "sft"
    assert (only_rl.model, only_rl.overrides) == ("specialist", ["sft.demonstrations=0", "rl.steps=5"])


def test_each_claim_is_one_stage_of_the_claims_pipeline(tmp_path: Path) -> None:
    from flows import claims

    (tmp_path / claims.PIPELINE.parent).mkdir(parents=True)
    entry = {"wdir": "../..", "matrix": {"method": ["one", "two"]}}
    entry |= {"cmd": "echo ${item.method} > ${item.method}.txt", "outs": ["${item.method}.txt"]}
    (tmp_path / claims.PIPELINE).write_text(yaml.safe_dump({"stages": {"claim": entry}}))
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], cwd=tmp_path, check=True)
    assert claims.known_methods(tmp_path) == ["one", "two"]
    target = f"{claims.PIPELINE}:claim@two"
    done = run_stage(target, tmp_path, echo=lambda line: None)
    assert [name.rsplit(":", 1)[-1] for name in done.ran] == ["claim@two"]
    assert not (tmp_path / "one.txt").exists()
    assert run_stage(target, tmp_path, echo=lambda line: None).unchanged


def test_the_claims_flow_runs_what_the_command_chooses() -> None:
    """Contract: names as given; without names the experiments of the profile, of which one without a profile is none."""
    from flows import claims

    assert claims.chosen(["rover", "lite_ppo"], "", ROOT) == {
        name: f"{claims.PIPELINE}:claim@{name}" for name in ("rover", "lite_ppo")
    }
    of_profile = claims.chosen(None, "gemma-270m", ROOT)
    assert "arpo_gemma" in of_profile
    assert "arpo" not in of_profile
    with pytest.raises(StageFailedError, match="unknown experiment three") as refused:
        claims.chosen(["three"], "", ROOT)
    assert refused.value.bad_parameters


def test_run_that_ends_beside_another_does_not_fail_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC removes the folder of a run's info when the run ends, also while the infos are searched."""
    for name in ("own", "other"):
        folder = tmp_path / RUN_FOLDERS / f"tmp{name}"
        folder.mkdir(parents=True)
        (tmp_path / RUN_INFOS / name).mkdir(parents=True)
        (tmp_path / RUN_INFOS / name / f"{name}.run").write_text(json.dumps({"name": name, "root_dir": str(folder)}))
    scan = os.scandir

    def ending(path: str | Path | int) -> object:
        if not isinstance(path, int) and Path(path).name == "other":
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", ending)
    remove_leftovers(tmp_path, "own")
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / RUN_FOLDERS).iterdir()] == ["tmpother"]
    assert not (tmp_path / RUN_INFOS / "own").exists()
