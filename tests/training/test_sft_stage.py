"""stages.sft on the toy domain: it learns, resumes exactly, stops early, counts its tokens."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
import torch

from stages import sft
from stages.records.episode import write_episodes, write_tasks
from training.toys import KilledError, demonstration, kill_at_step, letter_tasks, outputs

SFT = {"epochs": 3.5, "batch_tokens": 256, "learning_rate": 3e-3, "eval_every": 2, "checkpoint_every": 3, "patience": 4}


def test_sft_learns_and_counts_every_policy_token_once_per_epoch(make_context):
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


def test_number_of_demonstrations_can_be_limited(make_context):
    """Contract: sft.demonstrations draws that many of each domain's training demonstrations; with fewer, a subset of them."""
    shown = {}
    for count in (3, 5, 50):
        context = make_context("sft", f"n{count}", sft={**SFT, "epochs": 0.5, "demonstrations": count})
        sft.run(context)
        report = json.loads((context.root / "reports/sft.json").read_text())
        assert report["demonstrations"] == {"train": {"toy": min(count, 12)}, "valid": {"toy": 4}}
        drawn = sft.draw(sft.read_demonstrations(context)["train"], count, 3)
        shown[count] = {episode.episode_id for episode in drawn}
    assert shown[3] < shown[5] < shown[50]


def test_hints_of_demonstrations_keep_the_tasks_answers(make_context):
    """Contract: the stage reads which answers tasks accept; a hint with one of them is left out ("do this: open the door")."""
    weights = []
    for name, spec in (("none", {}), ("another", {"answer": "lamp"}), ("told", {"answer": "gate", "accepted": ["gate", "door"]})):
        context = make_context("sft", name, sft={**SFT, "epochs": 0.5, "guided": 1.0})
        write_tasks(context.root / "data/curated/toy/tasks.parquet", [replace(task, spec=spec) for task in letter_tasks(16)])
        sft.run(context)
        weights.append((context.root / "data/models/sft/model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
    assert sft.read_specs(make_context("sft", "unguided", sft=SFT)) == {}


def test_without_demonstrations_sft_saves_the_base_model(make_context, tiny_policy):
    context = make_context("sft", sft={**SFT, "demonstrations": 0})
    sft.run(context)
    weights = (context.root / "data/models/sft/model.safetensors").read_bytes()
    assert weights == (tiny_policy / "model.safetensors").read_bytes()
    assert json.loads((context.root / "reports/sft.json").read_text())["steps"] == 0


@pytest.mark.parametrize(("step", "rank"), [(4, 0), (7, 0), (7, 4)])
def test_resume_after_kill_writes_the_same_bytes(make_context, tiny_policy, step: int, rank: int):
    """Contract: outputs after a kill and a second start are those of an undisturbed run."""
    sections = {"sft": SFT, "model": {"path": str(tiny_policy), "max_length": 128, "lora": {"rank": rank}}}
    plain = make_context("sft", "plain", **sections)
    sft.run(plain)
    killed = make_context("sft", "killed", **sections)
    kill_at_step(killed, step)
    with pytest.raises(KilledError):
        sft.run(killed)
    (saved,) = (killed.root / ".bellwether").rglob("*.pt")
    assert saved.stat().st_size < (400_000 if rank else 2_000_000)
    sft.run(make_context("sft", "killed", **sections))
    assert outputs(killed.root) == outputs(plain.root)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_lora_learns_and_saves_a_full_model(make_context, tiny_policy, other_precision, precision: str):
    """Contract: with model.lora the output is a full float32 model: the base's weights with the adapter merged in."""
    from safetensors.torch import load_file

    from stages.agent.chat import Chat
    from stages.agent.policy import load_policy
    from stages.training.sft.job import SftJob

    context = make_context(
        "sft",
        sft={**SFT, "learning_rate": 3e-2},
        model={"path": str(tiny_policy), "max_length": 128, "lora": {"rank": 4}},
        resources={"slots": 16, "threads": 1, "tokens_per_batch": 512, "precision": precision},
    )
    sft.run(context)
    folder = context.root / "data/models/sft"
    before, after = load_file(tiny_policy / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(before) == set(after)
    for name, weight in before.items():
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], weight) == ("_proj" not in name), name
    report = json.loads((context.root / "reports/sft.json").read_text())
    with (context.root / "reports/sft/history.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert float(rows[-1]["train_loss"]) < 0.5 * float(rows[0]["train_loss"])
    assert report["trained_parameters"] == 4 * sum(sum(weight.shape) for name, weight in before.items() if "_proj" in name)
    policy = load_policy(folder, attention="sdpa")
    job = SftJob(context.params, policy.model, Chat(policy.tokenizer), sft.read_demonstrations(context))
    close = 1e-4 if precision == "float32" else 0.05
    assert job.validation_loss() == pytest.approx(report["valid_loss"], rel=close)


def test_gradient_checkpointing_gives_the_same_weights(make_context, tiny_policy):
    """Contract: recomputing layers in the backward pass changes results only by float rounding."""
    from safetensors.torch import load_file

    weights = []
    for name, switch in (("plain", False), ("checkpointing", True)):
        model = {"path": str(tiny_policy), "max_length": 128, "gradient_checkpointing": switch}
        context = make_context("sft", name, sft=SFT, model=model)
        sft.run(context)
        weights.append(load_file(context.root / "data/models/sft/model.safetensors"))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


def test_training_stops_early_and_keeps_the_best_weights(make_context):
    """Contract: with a learning rate that diverges, the weights kept are those of the lowest validation loss."""
    context = make_context(
        "sft", sft={**SFT, "epochs": 30.0, "eval_every": 1, "learning_rate": 0.3, "warmup": 0.0, "patience": 3}
    )
    sft.run(context)
    report = json.loads((context.root / "reports/sft.json").read_text())
    assert report["stopped_early"]
    assert report["steps"] == report["best_step"] + 3

    from stages.agent.chat import Chat
    from stages.agent.policy import load_policy
    from stages.training.sft.job import SftJob

    policy = load_policy(context.root / "data/models/sft", attention="sdpa")
    job = SftJob(context.params, policy.model, Chat(policy.tokenizer), sft.read_demonstrations(context))
    assert job.validation_loss() == pytest.approx(report["valid_loss"], rel=1e-5)


def test_demonstration_of_a_test_task_is_rejected(make_context):
    context = make_context("sft", sft=SFT)
    stranger = demonstration(letter_tasks(40)[39])
    write_episodes(context.root / "data/curated/toy/demonstrations.parquet", [stranger])
    with pytest.raises(ValueError, match="toy-039"):
        sft.run(context)
