"""stages.sft on the toy domain: it learns, resumes exactly, stops early, counts its tokens."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from stages import sft
from stages.agent.episode import write_episodes
from training.toys import KilledError, demonstration, kill_at_step, letter_tasks, outputs

SFT = {"epochs": 3.5, "batch_tokens": 256, "learning_rate": 3e-3, "eval_every": 2, "checkpoint_every": 3, "patience": 4}


def test_the_stage_learns_and_every_policy_token_counts_once_per_epoch(make_context):
    context = make_context("sft", sft=SFT)
    sft.run(context)
    report = json.loads((context.root / "reports/sft.json").read_text())
    with (context.root / "reports/sft/history.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert float(rows[-1]["train_loss"]) < 0.5 * float(rows[0]["train_loss"])
    assert report["steps"] == len(rows) == round(3.5 * (len(rows) / report["epochs"]))
    assert 3 * report["policy_tokens"] < report["ledger/policy_tokens_trained"] < 4 * report["policy_tokens"]
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["demonstrations"] == {"train": {"toy": 12}, "valid": {"toy": 4}}
    assert not list((context.root / ".bellwether").rglob("*.pt"))

    from stages.agent.policy import load_policy

    assert load_policy(context.root / "data/models/sft").model.dtype == torch.float32


@pytest.mark.parametrize("step", [4, 7])
def test_a_killed_run_ends_with_the_same_bytes(make_context, step: int):
    """Contract: outputs after a kill and a second start are those of an undisturbed run."""
    plain = make_context("sft", "plain", sft=SFT)
    sft.run(plain)
    killed = make_context("sft", "killed", sft=SFT)
    kill_at_step(killed, step)
    with pytest.raises(KilledError):
        sft.run(killed)
    assert list((killed.root / ".bellwether").rglob("*.pt"))
    sft.run(make_context("sft", "killed", sft=SFT))
    assert outputs(killed.root) == outputs(plain.root)


def test_training_stops_early_and_keeps_the_best_weights(make_context):
    """Contract: with a rate that ruins the model, the weights kept are those of the lowest validation loss."""
    context = make_context(
        "sft", sft={**SFT, "epochs": 30.0, "eval_every": 1, "learning_rate": 0.3, "warmup": 0.0, "patience": 3}
    )
    sft.run(context)
    report = json.loads((context.root / "reports/sft.json").read_text())
    assert report["stopped_early"]
    assert report["steps"] == report["best_step"] + 3

    from stages.agent.chat import Chat
    from stages.agent.policy import load_policy
    from stages.training.supervised import SftJob

    policy = load_policy(context.root / "data/models/sft", attention="sdpa")
    job = SftJob(context.params, policy.model, Chat(policy.tokenizer), sft.read_demonstrations(context))
    assert job.validation_loss() == pytest.approx(report["valid_loss"], rel=1e-5)


def test_a_demonstration_of_a_test_task_is_refused(make_context):
    context = make_context("sft", sft=SFT)
    stranger = demonstration(letter_tasks(40)[39])
    write_episodes(context.root / "data/curated/toy/demonstrations.parquet", [stranger])
    with pytest.raises(ValueError, match="toy-039"):
        sft.run(context)
