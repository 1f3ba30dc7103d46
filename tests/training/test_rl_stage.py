"""stages.rl on the toy domain: every algorithm learns, resumes exactly, samples and trains with the same log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from slow import slow_except

from stages import rl
from stages.records.episode import Owner, read_rows
from stages.training.rl import online
from stages.values.settings import HeadParams
from training.toys import KilledError, kill_at_step, outputs, run

RL: dict[str, Any] = {
    "steps": 6,
    "tasks_per_step": 6,
    "group_size": 6,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "dead_groups": "keep",
    "checkpoint_every": 2,
    "sampling": {"max_tokens": 3},
}
PPO: dict[str, Any] = {"algorithm": "ppo", "critic": {"warmup_steps": 1, "learning_rate": 0.01}}


def with_lora(make_context, rank: int = 8, **model: Any) -> dict[str, Any]:
    """The contexts' section `model`, with LoRA."""
    path = make_context("rl", "default").params.model.path
    return {"model": {"path": path, "max_length": 128, "lora": {"rank": rank}, **model}}


@pytest.mark.parametrize("algorithm", slow_except(("reinforce", "rloo", "grpo", "ppo"), "grpo", "ppo"))
def test_every_algorithm_learns(make_context, algorithm: str):
    chosen = PPO if algorithm == "ppo" else {"algorithm": algorithm}
    context = make_context("rl", rl={**RL, **chosen, "steps": 10, "learning_rate": 0.03})
    history = run(context)
    assert len(history) == 10
    assert sum(row["success"] for row in history[-2:]) / 2 > history[0]["success"] + 0.4
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["algorithm"] == algorithm
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["max_logprob_difference"] <= 1e-5
    steps = 9 if algorithm == "ppo" else 10
    trained = sum(row["policy_tokens"] for row in history[-steps:]) * 36
    assert report["ledger/policy_tokens_trained"] == pytest.approx(trained)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert history[-1]["kl"] > 0.01


def test_rover_successor_term_affects_the_first_step(make_context):
    """Contract: with its defaults ROVER makes several updates per step, so that the weight of its successor term changes the
    policy that results from the same episodes."""
    weights, first = set(), []
    for name, settings in {"whole": {}, "none": {"beta_next": 0.0}, "fivefold": {"beta_next": 5.0}}.items():
        section = {**RL, "algorithm": "rover", "steps": 1, "tasks_per_step": 4, "group_size": 4, "settings": settings}
        context = make_context("rl", name, rl=section)
        first.append(run(context)[0])
        weights.add((context.root / "data/models/rl/toy/model.safetensors").read_bytes())
    assert len(weights) == len({row["loss"] for row in first}) == 3
    assert len({(row["success"], row["policy_tokens"]) for row in first}) == 1
    assert {row["ratio_max"] > 1.0 for row in first} == {True}


# The absolute form's values are those of random play; with several tokens per action they would propagate token by token.
ABSOLUTE = {"settings": {"form": "absolute", "rho": 0.1}, "advantage": {"mean": "none"}, "sampling": {"max_tokens": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, ABSOLUTE], ids=["relative", "absolute"])
def test_rover_learns_in_both_forms(make_context, changes: dict[str, Any]):
    context = make_context("rl", rl={**RL, "algorithm": "rover", "steps": 20, **changes})
    history = run(context)
    assert sum(row["success"] for row in history[-4:]) / 4 > history[0]["success"] + 0.3
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["ledger/policy_tokens_trained"] == pytest.approx(sum(row["policy_tokens"] for row in history) * 36)


def test_samples_hold_advantages_of_the_first_and_last_step(make_context):
    context = make_context("rl", rl={**RL, "steps": 3})
    run(context)
    rows = read_rows(context.root / "data/rl/toy/samples.parquet")
    assert {row["step"] for row in rows} == {1, 3}
    assert len(rows) == 72
    for row in rows:
        assert len(row["advantages"]) == len(row["token_ids"])
        assert all(value == 0 for value, owner in zip(row["advantages"], row["owner"], strict=True) if owner != Owner.POLICY)
    assert any(value for row in rows for value in row["advantages"])
    assert "credit" not in rows[0], "only methods with step credit give any"


def test_run_ends_after_the_step_that_reaches_the_budget(make_context):
    """Contract: methods are compared at equal environment steps; a resumed run counts those before the kill."""
    context = make_context("rl", rl={**RL, "environment_steps": 100, "checkpoint_every": 1})
    kill_at_step(context, 2)
    with pytest.raises(KilledError):
        rl.run(context)
    history = run(make_context("rl", rl={**RL, "environment_steps": 100, "checkpoint_every": 1}))
    used = [row["environment_steps"] for row in history]
    assert sum(used[:-1]) < 100 <= sum(used)
    assert used[0] == pytest.approx(36 * history[0]["turns"])
    assert len(history) < RL["steps"]
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert (report["environment_steps"], report["budget"]) == (sum(used), 100)
    assert {row["step"] for row in read_rows(context.root / "data/rl/toy/samples.parquet")} == {1, len(history)}


def test_run_ends_when_it_reaches_stop_at_success(make_context):
    """Contract: it ends with the first step whose mean success over five steps is at least that; a kill in between changes
    nothing."""
    section = {**RL, "steps": 12, "learning_rate": 1e-9, "checkpoint_every": 1}
    undisturbed = [row["success"] for row in run(make_context("rl", "whole", rl=section))]
    means = [sum(undisturbed[step - 4 : step + 1]) / 5 for step in range(4, 12)]
    stop_at = max(0.0, means[2] - 1e-6)  # the history is rounded
    expected = 5 + next(place for place, mean in enumerate(means) if mean >= stop_at)
    context = make_context("rl", "stopped", rl={**section, "stop_at_success": stop_at})
    kill_at_step(context, 3)
    with pytest.raises(KilledError):
        rl.run(context)
    history = run(make_context("rl", "stopped", rl={**section, "stop_at_success": stop_at}))
    assert [row["success"] for row in history] == undisturbed[:expected]
    assert {row["step"] for row in read_rows(context.root / "data/rl/toy/samples.parquet")} == {1, expected}


def test_rl_seed_changes_the_rollouts(make_context):
    """Contract: runs that differ only in rl.seed share everything before rl; null is the run's seed."""
    first = [run(make_context("rl", f"s{seed}", rl={**RL, "steps": 1, "seed": seed}))[0] for seed in (None, 3, 4)]
    assert first[0] == first[1] != first[2]


@pytest.mark.parametrize("lora", slow_except((False, True), True))
@pytest.mark.parametrize("changes", [{}, {**PPO, "epochs": 2, "minibatches": 3, "critic": {**PPO["critic"], "distribution": {}}}])
def test_resume_after_kill_writes_the_same_bytes(make_context, changes: dict[str, Any], lora: bool):
    """Contract: outputs after a kill and a second start are those of an undisturbed run."""
    sections = {"rl": {**RL, "steps": 4, **changes}, **(with_lora(make_context) if lora else {})}
    plain = make_context("rl", "plain", **sections)
    rl.run(plain)
    killed = make_context("rl", "killed", **sections)
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", **sections))
    assert outputs(killed.root) == outputs(plain.root)


def test_dropping_dead_groups_gives_the_same_training(make_context):
    """Contract: with a group baseline, outcome credit and no KL or entropy term, drop and keep differ only by rounding; the
    tokens left out are counted."""
    settings = {**RL, "algorithm": "grpo", "steps": 2, "group_size": 3}
    kept = make_context("rl", "kept", rl=settings)
    dropped = make_context("rl", "dropped", rl={**settings, "dead_groups": "drop"})
    first, second = run(kept), run(dropped)
    assert sum(row["dead_groups"] for row in first) > 0
    for one, other in zip(first, second, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    reports = [json.loads((context.root / "reports/rl/toy.json").read_text()) for context in (kept, dropped)]
    assert reports[0]["ledger/policy_tokens_dropped"] == 0
    assert reports[1]["ledger/policy_tokens_dropped"] > 0
    totals = [report["ledger/policy_tokens_dropped"] + report["ledger/policy_tokens_trained"] for report in reports]
    assert totals[0] == totals[1]


def test_annotated_credit_uses_the_step_value_model(make_context, tiny_policy):
    from stages.agent.policy import load_policy
    from stages.values.step_value import StepValueModel

    settings = {**RL, "steps": 1, "credit": {"kind": "annotated", "weight": 1.0}}
    context = make_context("rl", rl=settings)
    with pytest.raises(FileNotFoundError, match="value_model"):
        rl.run(context)
    model = StepValueModel(load_policy(tiny_policy).model.base_model, HeadParams(loss="mse"))
    torch.nn.init.constant_(model.output.bias, 0.25)
    model.save(context.root / "data/annotated/toy/value_model")
    rl.run(context)
    for row in read_rows(context.root / "data/rl/toy/samples.parquet"):
        group = [other["reward"] for other in read_rows(context.root / "data/rl/toy/samples.parquet", ["group_id", "reward"])]
        assert len(group) == 36
        policy = [
            (value, turn) for value, turn, owner in zip(row["advantages"], row["turn"], row["owner"], strict=True) if owner == 1
        ]
        first = {value for value, turn in policy if turn == 0}
        last = {value for value, turn in policy if turn == 1}
        assert len(first) == len(last) == 1
        # V is 0.25 everywhere: the first turn is credited with 0, the last with R - 0.25.
        assert last.pop() - first.pop() == pytest.approx(row["reward"] - 0.25, abs=1e-5)


def test_logprob_difference_of_sampling_and_training_is_an_error(make_context, monkeypatch):
    """Contract: in float32, log-probs of the engine and of the training pass that differ by more than 1e-5 stop the run."""
    context = make_context("rl", rl={**RL, "steps": 1})
    played = online.OnlineJob.play

    def play(self, task_ids, step):
        episodes = played(self, task_ids, step)
        for episode in episodes:
            episode.logprob = [
                value + 3e-5 if owner == 1 else 0.0 for value, owner in zip(episode.logprob, episode.owner, strict=True)
            ]
        return episodes

    monkeypatch.setattr(online.OnlineJob, "play", play)
    with pytest.raises(ValueError, match="sampling and training"):
        rl.run(context)


@pytest.mark.parametrize(
    "changes", [{"loss": {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01}}, {"epochs": 2, "minibatches": 2}]
)
def test_other_switches_run(make_context, changes: dict[str, Any]):
    history = run(make_context("rl", rl={**RL, "steps": 2, **changes}))
    assert all(abs(row["loss"]) < 10 for row in history)
    assert history[0]["ratio_max"] == pytest.approx(1.0, abs=1e-4) if "epochs" not in changes else history[0]["ratio_max"] > 1.0


@pytest.mark.parametrize("algorithm", ["reinforce", pytest.param("ppo", marks=pytest.mark.slow)])
def test_lora_learns_and_saves_an_adapter(make_context, tiny_policy, algorithm: str):
    """Contract: with model.lora the specialist is an adapter on data/models/sft; sampling and training log-probs agree,
    and KL is relative to the weights without the adapter."""
    from stages.agent.policy import load_policy
    from stages.engine.adapters import Adapter, is_adapter

    chosen = PPO if algorithm == "ppo" else {"algorithm": algorithm}
    settings = {**RL, **chosen, "steps": 12, "learning_rate": 0.015}
    context = make_context("rl", rl=settings, **with_lora(make_context, gradient_checkpointing=algorithm == "ppo"))
    history = run(context)
    assert sum(row["success"] for row in history[-4:]) / 4 > history[0]["success"] + 0.25
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert history[-1]["kl"] > 0.01
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["max_logprob_difference"] <= 1e-5
    assert report["ledger/environment_tokens_trained"] == 0
    folder = context.root / "data/models/rl/toy"
    assert is_adapter(folder)
    assert not list(folder.glob("model*.safetensors"))
    assert Adapter(folder).base == context.root / "data/models/sft"
    weights = (tiny_policy / "model.safetensors").stat().st_size
    assert (folder / "adapter_model.safetensors").stat().st_size < weights
    changed, start = load_policy(folder).model, load_policy(tiny_policy).model
    assert torch.equal(changed.model.norm.weight, start.model.norm.weight)
    assert not torch.equal(changed.model.layers[0].mlp.up_proj.weight, start.model.layers[0].mlp.up_proj.weight)


def test_rl_seed_determines_the_initial_lora_factors(make_context, tiny_policy):
    """Contract: all random numbers of rl come from rl.seed; null is the run's seed."""
    from safetensors.torch import load_file

    found = {}
    for name, seeds in (("null", {}), ("equal", {"seed": 3}), ("other", {"seed": 4})):
        settings = {**RL, "steps": 1, "learning_rate": 1e-12, "algorithm": "grpo", **seeds}
        context = make_context("rl", name, rl=settings, **with_lora(make_context))
        rl.run(context)
        factors = load_file(context.root / "data/models/rl/toy/adapter_model.safetensors")
        found[name] = torch.cat([factors[key].flatten() for key in sorted(factors) if "lora_A" in key])
    assert torch.allclose(found["null"], found["equal"], rtol=0, atol=1e-6)
    assert not torch.allclose(found["null"], found["other"], rtol=0, atol=1e-2)


def test_gradient_checkpointing_gives_the_same_training(make_context):
    """Contract: model.gradient_checkpointing changes memory and time, and the history only by rounding."""
    settings = {**RL, "steps": 2, "share_prefixes": False}
    plain = run(make_context("rl", "plain", rl=settings))
    path = make_context("rl", "plain").params.model.path
    checkpointing = {"path": path, "max_length": 128, "gradient_checkpointing": True}
    for one, other in zip(plain, run(make_context("rl", "checkpointing", rl=settings, model=checkpointing)), strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6, nan_ok=True)


def test_bfloat16_with_lora_runs(make_context, other_precision):
    """Contract: the saved factors are float32."""
    from safetensors.torch import load_file

    resources = {"slots": 16, "threads": 1, "tokens_per_batch": 512, "precision": "bfloat16"}
    context = make_context("rl", rl={**RL, "steps": 2}, resources=resources, **with_lora(make_context))
    history = run(context)
    assert all(abs(row["loss"]) < 10 for row in history)
    factors = load_file(context.root / "data/models/rl/toy/adapter_model.safetensors")
    assert {tensor.dtype for tensor in factors.values()} == {torch.float32}
    assert any(bool((tensor != 0).any()) for name, tensor in factors.items() if "lora_B" in name)
