"""A run of the claims board by the real stages: from a commit, over a start that is made once, on the tiny profile."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from checkout import Checkout

from stages.claims.experiment import Experiment, run_values
from stages.claims.workshop import Workshop, clean_commit

pytestmark = pytest.mark.timeout(900)


def test_runs_of_a_commit_share_their_start_and_leave_the_checkout_alone(tmp_path: Path, source: Path) -> None:
    """The start is brought up by `dvc repro` over the checkout's cache; arms and seeds differ in rl alone."""
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
    workshop = Workshop(checkout.root, clean_commit(checkout.root))
    metrics = ["panel.success", "history.entropy.mean", "report.environment_steps"]
    values = run_values(experiment, "rloo", 1, params)
    start = workshop.start(values)
    made = (start / "data/models/sft/model.safetensors").stat().st_mtime_ns
    assert workshop.start_success(values) == 0.0, "the tiny model never succeeds"

    outcome = workshop.play("one", values, metrics)
    assert outcome["metrics"]["panel.success"] == 0.0
    assert outcome["environment_steps"] == outcome["metrics"]["report.environment_steps"] >= 20
    assert outcome["commit"] == workshop.commit
    assert not (workshop.folder / "one").exists()
    again = workshop.play("two", values, metrics)
    other = workshop.play("three", run_values(experiment, "grpo", 2, params), metrics)
    assert again["metrics"] == outcome["metrics"]
    assert other["metrics"]["history.entropy.mean"] != outcome["metrics"]["history.entropy.mean"]
    assert [path.name for path in workshop.folder.iterdir()] == [start.name]
    assert (start / "data/models/sft/model.safetensors").stat().st_mtime_ns == made
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=checkout.root, capture_output=True, text=True, check=True)
    assert changed.stdout == ""
    assert not (checkout.root / "data/curated").exists()
    assert list((checkout.root / ".dvc/cache").rglob("*")), "what the start needed is kept for the next commit"
