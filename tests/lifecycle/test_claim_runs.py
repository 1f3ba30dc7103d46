"""Runs of the claims board by the real stages, on the tiny profile; runs of one commit share their start."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from checkout import Checkout

from stages.claims.experiment import Experiment, run_values
from stages.claims.runner import ExperimentRunner, clean_commit
from stages.runtime.workspace import RunFailedError

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def test_claim_runs_share_their_start_and_leave_the_checkout_unchanged(tmp_path: Path, source: Path) -> None:
    """`dvc repro` makes the start with the checkout's cache; arms and seeds differ only in rl, also in parallel."""
    checkout = Checkout.make(tmp_path / "root", source)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["add", "."], [*identity, "commit", "--quiet", "-m", "start"]):
        subprocess.run(["git", *arguments], cwd=checkout.root, check=True)
    experiment = Experiment.model_validate(
        {
            **{"method": "m", "paper": "p", "switch": "s", "environment": "search", "seeds": [0, 1, 2, 3, 4]},
            "budget": {"environment_steps": 20},
            "arms": {"rloo": {"rl": {"algorithm": "rloo"}}, "grpo": {"rl": {"algorithm": "grpo"}}},
            "claims": [{"says": "x", "arm": "rloo", "against": "grpo"}],
        }
    )
    params = yaml.safe_load((checkout.root / "params.yaml").read_text())
    runner = ExperimentRunner(checkout.root, clean_commit(checkout.root), workers=2)
    metrics = ["panel.success", "history.entropy.mean", "report.environment_steps"]
    values = run_values(experiment, "rloo", 1, params)
    start = runner.start(values).folder
    made = (start / "data/models/sft/model.safetensors").stat().st_mtime_ns
    assert runner.start_success(values) == 0.0, "the tiny model never succeeds"

    outcome = runner.train_and_evaluate("one", values, metrics)
    assert outcome["metrics"]["panel.success"] == 0.0
    assert outcome["environment_steps"] == outcome["metrics"]["report.environment_steps"] >= 20
    assert outcome["commit"] == runner.commit
    assert not (runner.folder / "one").exists()
    different = run_values(experiment, "grpo", 2, params)
    with ThreadPoolExecutor(2) as pool:  # in parallel, with the same results
        parallel = [pool.submit(runner.train_and_evaluate, *run, metrics) for run in (("two", values), ("three", different))]
    again, other = (run.result() for run in parallel)
    assert again["metrics"] == outcome["metrics"]
    assert other["metrics"]["history.entropy.mean"] != outcome["metrics"]["history.entropy.mean"]
    assert [path.name for path in runner.folder.iterdir()] == [start.name]
    assert (start / "data/models/sft/model.safetensors").stat().st_mtime_ns == made
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=checkout.root, capture_output=True, text=True, check=True)
    assert changed.stdout == ""
    assert not (checkout.root / "data/curated").exists()
    assert list((checkout.root / ".dvc/cache").rglob("*")), "the start stays in the cache for the next commit"


def test_claim_runs_without_reinforcement_learning(tmp_path: Path, source: Path) -> None:
    """Lane annotate evaluates the SFT policy as the arm says, without training a specialist; lane offline_q learns from games."""
    checkout = Checkout.make(tmp_path / "root", source)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["add", "."], [*identity, "commit", "--quiet", "-m", "start"]):
        subprocess.run(["git", *arguments], cwd=checkout.root, check=True)
    shared = {"method": "m", "paper": "p", "switch": "s", "seeds": [0, 1, 2, 3, 4]}
    choice = Experiment.model_validate(
        {
            **shared,
            **{"lane": "annotate", "start": "own", "environment": "search"},
            "shared": {"annotate": {"q_model": {"kind": "regression", "epochs": 0.5}}},
            "arms": {"plain": {}, "q": {"evaluate": {"models": ["sft+q"], "best_of": {"n": 2}}}},
            "claims": [{"says": "x", "arm": "q", "against": "plain"}],
        }
    )
    params = yaml.safe_load((checkout.root / "params.yaml").read_text())
    runner = ExperimentRunner(checkout.root, clean_commit(checkout.root))
    metrics = ["panel.success", "panel.accepted", "annotate.q_model.held_out.pairs"]
    outcome = runner.train_and_evaluate("one", run_values(choice, "q", 1, params), metrics, trains=False)
    assert outcome["metrics"]["panel.success"] == 0.0
    assert outcome["environment_steps"] > 0, "steps of the search trees"
    assert not list(runner.folder.rglob("data/models/rl"))

    offline = Experiment.model_validate(
        {
            **shared,
            **{"lane": "offline_q", "environment": "guessing", "shared": {"updates": 2, "games": 50, "play": 10}},
            "arms": {"mse": {"head": {"loss": "mse"}}, "noisy": {"noise": 0.1, "head": {"loss": "mse"}}},
            "claims": [{"says": "x", "arm": "mse", "against": "noisy", "metric": "offline.win_rate"}],
        }
    )
    values = run_values(offline, "mse", 3, params)
    first, again = (
        runner.measure("offline_q", name, values, {}, ["offline.win_rate", "offline.value_rmse"]) for name in ("a", "b")
    )
    assert first["metrics"] == again["metrics"]
    with pytest.raises(RunFailedError, match=r"no metric 'offline\.speed'"):
        runner.measure("offline_q", "c", values, {}, ["offline.speed"])
