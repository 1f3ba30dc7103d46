"""Runs of the claims board by the real stages, on the tiny profile; runs of one commit share their start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from checkout import Checkout

from stages.claims.arms import run_values
from stages.claims.experiment import Experiment
from stages.claims.results import Results
from stages.claims.runner import ExperimentRunner, clean_commit
from stages.claims.session import Session
from stages.claims.tuning import chosen_values
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
            **{"method": "m", "paper": "p", "switch": "s", "environment": "search", "family": "credit", "looks": [2]},
            **{"tune": {"key": "rl.learning_rate", "values": [1e-9, 0.0001]}, "ungated": "the tiny model never succeeds"},
            "budget": {"environment_steps": 20},
            "shared": {"curate": {"valid": 96, "seeds": {"valid": 1}}},  # as many as tuning takes: it has the same start
            "arms": {"rloo": {"rl": {"algorithm": "rloo"}}, "start": {"evaluate": {"models": ["sft"]}}},
            "claims": [{"says": "x", "arm": "rloo", "against": "start"}],
            "measured": ["history.entropy.mean", "report.environment_steps"],
        }
    )
    params = yaml.safe_load((checkout.root / "params.yaml").read_text())
    runner = ExperimentRunner(checkout.root, clean_commit(checkout.root), workers=2)
    values = run_values(experiment, "rloo", 1, params, 1e-9)
    start = runner.start(values).folder
    made = (start / "data/models/sft/model.safetensors").stat().st_mtime_ns
    alone = runner.train_and_evaluate("alone", values, ["panel.success", *experiment.measured])
    runner.release("alone")

    assert Session(checkout.root, "x", experiment, params, runner, jobs=2).run() == 0
    stored = Results.load(checkout.root, "x")
    assert set(stored.outcomes) == {"rloo/0", "rloo/1", "start/0"}
    assert chosen_values(experiment, stored) == {"rloo": 1e-9}, "nothing ever succeeds: the smaller one"
    one, other, played = (stored.outcomes[name] for name in ("rloo/1", "rloo/0", "start/0"))
    assert {name: one["metrics"][name] for name in alone.metrics} == alone.metrics, "in parallel, with the same results"
    assert one["environment_steps"] == one["metrics"]["report.environment_steps"] >= 20
    assert one["metrics"]["history.entropy.mean"] != other["metrics"]["history.entropy.mean"]
    assert (one["code"], one["commit"], stored.starts["rloo"], played["metrics"]["panel.success"]) == (
        runner.code,
        runner.commit,
        0.0,
        0.0,
    )
    panel = [row["task_id"] for row in stored.tables.rows["start/0"]]
    assert panel == [row["task_id"] for row in stored.tables.rows["rloo/0"]] != []
    assert [row["step"] for row in stored.tables.curves["rloo/0"]] == list(range(1, len(stored.tables.curves["rloo/0"]) + 1))
    assert {path.name.partition("-")[0] for path in runner.folder.iterdir()} == {"start"}, "runs leave nothing behind"
    assert (start / "data/models/sft/model.safetensors").stat().st_mtime_ns == made
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=checkout.root, capture_output=True, text=True, check=True)
    assert all(line[3:].startswith("reports/claims/") for line in changed.stdout.splitlines()), changed.stdout
    assert not (checkout.root / "data/curated").exists()
    assert list((checkout.root / ".dvc/cache").rglob("*")), "the start stays in the cache for the next commit"


def test_claim_runs_without_reinforcement_learning(tmp_path: Path, source: Path) -> None:
    """Lane annotate evaluates the SFT policy as the arm says, without training a specialist; lane control learns from games."""
    checkout = Checkout.make(tmp_path / "root", source)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["add", "."], [*identity, "commit", "--quiet", "-m", "start"]):
        subprocess.run(["git", *arguments], cwd=checkout.root, check=True)
    shared = {"method": "m", "paper": "p", "switch": "s", "family": "credit"}
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
    assert outcome.metrics["panel.success"] == 0.0
    assert outcome.environment_steps > 0, "steps of the search trees"
    assert not list(runner.folder.rglob("data/models/rl"))

    offline = Experiment.model_validate(
        {
            **shared,
            **{"lane": "control", "environment": "guessing", "shared": {"updates": 2, "games": 50, "play": 10}},
            "arms": {"mse": {"head": {"loss": "mse"}}, "noisy": {"noise": 0.1, "head": {"loss": "mse"}}},
            "claims": [{"says": "x", "arm": "mse", "against": "noisy", "metric": "offline.win_rate"}],
        }
    )
    values = run_values(offline, "mse", 3, params)
    player = ExperimentRunner(checkout.root, runner.commit, program="guessing")
    first, again = (player.measure(name, values, {}, ["offline.win_rate", "offline.value_rmse"]) for name in ("a", "b"))
    assert first.metrics == again.metrics
    with pytest.raises(RunFailedError, match=r"no metric 'offline\.speed'"):
        player.measure("c", values, {}, ["offline.speed"])
