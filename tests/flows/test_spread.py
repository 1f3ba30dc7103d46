"""The lifecycle over seeds: what is run, and what it costs, before anything runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import flows  # noqa: F401  (its settings must be there before Prefect is imported)
from flows import spread
from flows.experiments import find
from flows.overrides import check_overrides
from flows.process import StageFailedError
from flows.spread import Spread, collect, cost, plan_runs

ROOT = Path(__file__).resolve().parents[2]
PARAMS = """
domains: [a, b]
curate: {test: 200}
per_domain: {a: {curate: {test: 50}}, b: {curate: {}}}
"""
DVC_YAML = "stages: {evaluate: {cmd: 'true', deps: [params.yaml]}}\n"
RUN = {"params": {"curate": {"test": 200}}, "measured": {"rl@a": {"cpu_seconds": 240}, "evaluate": {"cpu_seconds": 60}}}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in (("dvc.yaml", DVC_YAML), ("params.yaml", PARAMS)):
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "start")
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)


def test_each_seed_runs_everything_on_the_same_panels(checkout: Path) -> None:
    """Contract: runs differ in `seed` alone, and every domain has the fresh panel, also one with a size of its own."""
    plan = plan_runs(Spread(seeds=[3, 4], panel_seed=9, tasks=400, jobs=1), checkout)
    panels = ["curate.test=400", "per_domain.a.curate.test=400", "curate.seeds.test=9"]
    assert {seed: overrides for seed, (_, overrides) in plan.items()} == {seed: [f"seed={seed}", *panels] for seed in (3, 4)}
    assert len({name for name, _ in plan.values()}) == 2
    shared = plan_runs(Spread(seeds=[3, 4], jobs=2), checkout)[3][1]
    assert shared[-2:] == ["resources.threads=1", "resources.workers=1"]
    assert plan_runs(Spread(seeds=[3, 4], panel_seed=9, jobs=1), checkout) == plan, "equal settings are the same experiments"


def test_fixed_seeds_of_rl_vary_too(checkout: Path) -> None:
    """Contract: no rl.seed of params.yaml makes the runs' reinforcement learning draw the same numbers."""
    (checkout / "params.yaml").write_text(PARAMS.replace("a: {", "a: {rl: {seed: 7}, ") + "rl: {seed: 5}\n")
    plan = plan_runs(Spread(seeds=[3, 4], jobs=1), checkout)
    assert plan[3][1][:3] == ["seed=3", "rl.seed=null", "per_domain.a.rl.seed=null"]


@pytest.mark.slow
def test_the_settings_are_those_of_params_yaml() -> None:
    check_overrides(ROOT, ["seed=4", "curate.test=400", "curate.seeds.test=1"])
    with pytest.raises(ValidationError):
        Spread(seeds=[0])


def test_the_cost_is_stated_first(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """240 s and 60 s for 200 tasks are 240 + 120 s = 6 minutes for 400; an experiment that exists costs nothing."""
    settings = Spread(seeds=[0, 1, 2], jobs=2)
    plan = plan_runs(settings, checkout)
    assert "their cost is unknown, since reports/runs.jsonl has no measured run" in cost(settings, checkout, plan)
    (checkout / "reports").mkdir()
    (checkout / "reports/runs.jsonl").write_text(f"{json.dumps(RUN)}\n{json.dumps({**RUN, 'measured': {}})}\n")
    git(checkout, "update-ref", f"refs/exps/ab/cdef/{plan[1][0]}", "HEAD")
    assert find(checkout, plan[1][0])
    line = "2 of 3 lifecycles to run, 2 at a time; about 6 CPU minutes each, 12 in all (measured in reports/runs.jsonl)"
    assert cost(settings, checkout, plan) == line
    monkeypatch.setattr(spread, "ROOT", checkout)
    monkeypatch.setattr(sys, "argv", ["spread", "--seeds", "0", "1", "2", "--jobs", "2", "--check"])
    assert spread.main() == 0
    assert capsys.readouterr().out == f"spread: {line}\n"


def test_a_missing_experiment_is_named(checkout: Path) -> None:
    with pytest.raises(StageFailedError, match="there is no experiment spread-0-"):
        collect(checkout, plan_runs(Spread(seeds=[0, 1], jobs=1), checkout))
