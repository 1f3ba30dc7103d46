"""stages.rl with every online method that test_rl_stage.py does not cover: each runs on the toy domain and resumes exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors.torch import load_file
from slow import slow_except

from stages import rl
from stages.algorithms import methods
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.critic import learns_values
from stages.algorithms.registry import composition, names
from stages.algorithms.settings import Rl
from stages.records.episode import read_rows
from stages.training.rl import online
from training.toys import KilledError, kill_at_step, outputs, run

RL: dict[str, Any] = {
    "steps": 2,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}
LEARNT = {"reinforce", "rloo", "grpo", "ppo"}
"""Methods that tests/training/test_rl_stage.py trains until they succeed."""
ELSEWHERE = {"reseek", "rlmt", "router_r1", "salmon", "ssp", "ssrl"}
METHODS = sorted({name for name in names() if composition(name).data == "episodes"} - LEARNT - ELSEWHERE)
"""tests/training/test_archer.py has those with a replay buffer, test_judgments_rl.py the one that needs judgments,
test_priced_rl.py the one that needs prices, test_self_play.py the one whose tasks need answers, test_evidence_rl.py the one that
needs a graded format, test_rlmt.py the one that thinks, test_salmon.py the one that needs a judge model."""


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_with_its_defaults(make_context, tiny_policy, name: str):
    """Contract: only `rl.algorithm` is set, and the ledger counts its tokens."""
    # No critic warm-up; more steps for scaling_inter, in whose first stage, of one turn, no episode can succeed; longer answers
    # for rlvrr, some of which are as long as the demonstrations'.
    longer = {"group_size": 8, "sampling": {"max_tokens": 8}}
    extra = {"scaling_inter": {"steps": 3, "group_size": 8}, "rlvrr": longer}.get(name, {})
    if learns_values(resolve(Rl(algorithm=name)).rl):
        extra = {"critic": {"warmup_steps": 0}}
    annotate = {"progress": {"kind": "spa"}} if resolve(Rl(algorithm=name)).needs_progress else {}
    context = make_context("rl", rl={**RL, **extra, "algorithm": name}, annotate=annotate)
    if annotate:
        store_progress(context, tiny_policy, 0.25)
    history = run(context)
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["algorithm"] == name
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["ledger/policy_tokens_trained"] > 0
    assert report["environment_steps"] == sum(row["environment_steps"] for row in history)
    trained, start = (load_file(folder / "model.safetensors") for folder in (context.root / "data/models/rl/toy", tiny_policy))
    assert any(not trained[tensor].equal(start[tensor]) for tensor in start)


def store_progress(context, tiny_policy, contribution: float) -> None:
    """Save a progress estimator that predicts `contribution` for every turn."""
    import torch

    from stages.agent.policy import load_policy
    from stages.values.progress import ProgressEstimator
    from stages.values.settings import HeadParams

    model = ProgressEstimator(load_policy(tiny_policy).model.base_model, HeadParams(loss="mse"))
    torch.nn.init.constant_(model.output.bias, contribution)
    model.save(context.root / "data/annotated/toy/progress_model")


def test_progress_credits_turns_and_is_reported(make_context, tiny_policy):
    """spa_rl: every turn is rewarded with its contribution instead of the return; the history has the share of accepted actions
    and the difference between contributions and returns."""
    settings = {**RL, "steps": 1, "algorithm": "grpo", "advantage": {"level": "turn", "mean": "none", "std": "none"}}
    context = make_context("rl", rl={**settings, "credit": {"kind": "progress"}}, annotate={"progress": {"kind": "spa"}})
    with pytest.raises(FileNotFoundError, match="progress_model"):
        rl.run(context)
    store_progress(context, tiny_policy, 0.25)
    (row,) = run(context)
    assert row["grounded"] == 1.0
    samples = read_rows(context.root / "data/rl/toy/samples.parquet")
    expected = sum(abs(sample["reward"] - 0.5) for sample in samples) / len(samples)
    assert row["progress_residual"] == pytest.approx(expected, abs=1e-5)
    for sample in samples:
        assert sample["credit"] == [0.25, 0.25]
        tokens = zip(sample["advantages"], sample["turn"], sample["owner"], strict=True)
        assert {(turn, round(value, 5)) for value, turn, owner in tokens if owner == 1} == {(0, 0.5), (1, 0.25)}


def set_outcomes(context, monkeypatch, dead: set[str]) -> None:
    """Make the tasks in `dead` fail whatever the policy does, and the others succeed at every second attempt."""
    played = online.OnlineJob.play

    def play(self, task_ids, step, greedy=False):
        episodes = played(self, task_ids, step, greedy)
        for number, episode in enumerate(episodes):
            episode.reward = float(episode.task_id not in dead and number % 2 == 0)
            episode.turns[-1].reward = episode.reward
        return episodes

    monkeypatch.setattr(online.OnlineJob, "play", play)


def test_dynamic_sampling_replaces_dead_groups(make_context, monkeypatch):
    """dapo: dead groups are replaced by further tasks, at most `rounds` times; all rollouts are counted."""
    tasks = {f"toy-{index:03d}" for index in range(16) if index % 4 != 3}
    context = make_context(
        "rl", rl={**RL, "steps": 1, "algorithm": "dapo", "tasks_per_step": 4, "group_resampling": {"rounds": 6}}
    )
    set_outcomes(context, monkeypatch, dead=set(sorted(tasks)[::2]))
    (row,) = run(context)
    assert row["live_groups"] >= 4
    assert row["groups"] > 4
    assert row["episodes"] == row["groups"] * 3
    assert row["dead_steps"] == row["dead_groups"] * 3 * 2, "an episode has two turns"
    assert 1 <= row["resampling_rounds"] <= 6
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["episodes"] == row["episodes"]
    assert report["ledger/policy_tokens_dropped"] > 0
    played = {sample["task_id"] for sample in read_rows(context.root / "data/rl/toy/samples.parquet")}
    assert len(played) == row["groups"]


def test_steps_with_only_dead_groups_are_skipped(make_context, monkeypatch):
    """Contract: when every group is dead there is no optimiser step, the weights stay, and the history says so."""
    for name in ("dapo", "vspo"):
        context = make_context("rl", name, rl={**RL, "algorithm": name, "weight_decay": 0.1, "dead_groups": "keep"})
        set_outcomes(context, monkeypatch, dead={f"toy-{index:03d}" for index in range(16)})
        history = run(context)
        assert [row["skipped"] for row in history] == [1.0, 1.0]
        assert context.tracker.metrics["dead_groups/share"] == [1.0, 1.0]
        assert context.tracker.metrics["dead_groups/environment_steps"] == [row["environment_steps"] for row in history]
        assert [row["dead_steps"] for row in history] == [row["environment_steps"] for row in history]
        start = context.root / "data/models/sft/model.safetensors"
        assert (context.root / "data/models/rl/toy/model.safetensors").read_bytes() == start.read_bytes()
        assert history[0]["groups"] == (12.0 if name == "dapo" else 3.0)


def test_remax_plays_one_greedy_episode_per_task(make_context):
    context = make_context("rl", rl={**RL, "algorithm": "remax", "group_size": 1})
    history = run(context)
    assert [row["episodes"] for row in history] == [6.0, 6.0]
    assert [row["environment_steps"] for row in history] == [12.0, 12.0]
    assert len(read_rows(context.root / "data/rl/toy/samples.parquet")) == 6


@pytest.mark.parametrize("name", slow_except(("arpo", "dapo", "pacs", "remax", "rl_plus", "vspo"), "arpo", "rl_plus"))
def test_resume_after_kill_writes_the_same_bytes(make_context, monkeypatch, name: str):
    """Contract: further tasks, greedy episodes, demonstrations, drawn copies and branches are the same after a kill."""
    sections = {"rl": {**RL, "steps": 3, "algorithm": name}}
    plain = make_context("rl", "plain", **sections)
    rl.run(plain)
    killed = make_context("rl", "killed", **sections)
    kill_at_step(killed, 2)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", **sections))
    assert outputs(killed.root) == outputs(plain.root)


def test_inherited_turns_of_branches_are_not_counted_again(make_context):
    """arpo: inherited turns count no further environment steps or tool calls; credit: branches has the same rollouts."""
    rollouts = {}
    for credit in ("outcome", "branches"):
        section = {**RL, "steps": 1, "algorithm": "arpo", "branching": {"base": 1.0, "initial": 2}, "credit": {"kind": credit}}
        context = make_context("rl", credit, rl=section)
        (row,) = run(context)
        samples = read_rows(context.root / "data/rl/toy/samples.parquet")
        played = sum(len(sample["turns"]) - sample["inherited"] for sample in samples)
        assert row["environment_steps"] == row["tool_calls"] == played < row["turns"] * row["episodes"]
        assert row["episodes"] == 9
        assert row["branches"] == pytest.approx(3 / 9)
        rollouts[credit] = [(sample["episode_id"], sample["parent"], sample["token_ids"]) for sample in samples]
    assert rollouts["outcome"] == rollouts["branches"]
    assert row["merged_steps"] == pytest.approx(6 / 18)


def test_salt_with_scrambled_keys_equals_grpo(make_context):
    """The control gives the same weights as GRPO; with salt the history has the share of merged steps."""
    weights = {}
    sections = {
        "grpo": {"algorithm": "grpo"},
        "scrambled": {"algorithm": "salt", "credit": {"match": "scrambled"}},
        "salt": {"algorithm": "salt", "credit": {"key": "state_action"}},
    }
    for name, section in sections.items():
        context = make_context("rl", name, rl={**RL, "group_size": 6, **section})
        history = run(context)
        weights[name] = (context.root / "data/models/rl/toy/model.safetensors").read_bytes()
        assert ("merged_steps" in history[0]) == (name != "grpo")
    assert weights["scrambled"] == weights["grpo"]


def test_model_aware_selection_draws_only_partly_solved_tasks(make_context):
    from stages.records.episode import write_json

    context = make_context("rl", rl={**RL, "selection": {"kind": "model_aware"}})
    measured = {f"toy-{index:03d}": share for index, share in ((0, 0.0), (1, 0.25), (2, 0.5), (4, 0.75), (5, 1.0))}
    write_json(context.root / "data/rollouts/toy/difficulty.json", measured)
    run(context)
    played = {row["task_id"] for row in read_rows(context.root / "data/rl/toy/samples.parquet")}
    assert played == {"toy-001", "toy-002", "toy-004"}


def test_reported_success_is_independent_of_reward_shaping(make_context):
    """Contract: shaping changes the training reward, not what counts as success."""
    shaped = run(make_context("rl", "shaped", rl={**RL, "steps": 1, "reward": {"correct": 5.0, "wrong": 2.0}}))
    plain = run(make_context("rl", "plain", rl={**RL, "steps": 1}))
    assert shaped[0]["success"] == plain[0]["success"]
    assert shaped[0]["reward_mean"] == plain[0]["reward_mean"]
    assert shaped[0]["shaped_reward"] == pytest.approx(2.0 + 3.0 * plain[0]["success"], abs=1e-6)


RUNNING_MEAN = """
from stages.plugins import Card, Composition

def advantage(batch, rl, state):
    below = batch.rewards.clone()
    for row, (task_id, reward) in enumerate(zip(batch.task_ids, batch.rewards.tolist())):
        count, mean = state.get(task_id, (0, 0.0))
        below[row] = mean
        state[task_id] = (count + 1, mean + (reward - mean) / (count + 1))
    seen = float(sum(count for count, _ in state.values()))
    return batch.with_(advantages=(batch.rewards - below)[:, None] * batch.mask).with_metrics(seen=seen)

COMPOSITION = Composition(
    card=Card("running_mean", "Running mean", "-", "A = R - running mean of the task", "-", "-", "-", "-"),
    parts={"loss.kind": "policy_gradient"},
    pieces={"advantage": advantage},
    state=dict,
)
"""


def test_state_of_an_outside_method_survives_a_kill(make_context, tmp_path, monkeypatch):
    """Contract: batches carry task ids, and a method's state is part of checkpoints: a killed run ends with the same bytes."""
    (tmp_path / "running_mean.py").write_text(RUNNING_MEAN)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    section = {**RL, "steps": 4, "algorithm": "running_mean"}
    plain, killed = make_context("rl", "plain", rl=section), make_context("rl", "killed", rl=section)
    history = run(plain)
    assert [row["seen"] for row in history] == [9.0, 18.0, 27.0, 36.0]
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", rl=section))
    assert outputs(killed.root) == outputs(plain.root)
