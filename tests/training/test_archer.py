"""Replay buffers in the rl stage: what is drawn, kept and resumed, online and offline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slow import slow_except

from stages import rl
from stages.agent.chat import Chat
from stages.agent.continuations import ContinuationRequest, sample_turns
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.records.episode import Episode, Owner, TurnRecord, read_episodes, read_rows, write_episodes
from stages.training.common.batches import trajectory_batch
from stages.training.rl import online
from stages.training.rl.demonstrations import as_external
from stages.training.rl.off_policy import OffPolicy, as_turns
from stages.training.rl.offline_dataset import read_offline_dataset
from stages.training.rl.replay_buffer import ReplayBuffer
from training.toys import (
    KilledError,
    as_processes,
    demonstration,
    kill_at_step,
    letter_tasks,
    make_episode,
    outputs,
    read_history,
)

REPLAY: dict[str, Any] = {"episodes": 8, "critic_updates": 3, "policy_updates": 1}
RL: dict[str, Any] = {
    "algorithm": "archer",
    "steps": 3,
    "tasks_per_step": 6,
    "group_size": 2,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
    "critic": {"warmup_steps": 0, "learning_rate": 0.01},
    "replay": REPLAY,
}


def run(context) -> tuple[list[dict[str, float]], dict[str, Any]]:
    rl.run(context)
    history = read_history(context.root)
    return history, json.loads((context.root / "reports/rl/toy.json").read_text())


def section(**changes: Any) -> dict[str, Any]:
    """`RL` with changes, merged into its sections."""
    return {**RL, **{key: {**RL.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()}}


def store_rollouts(context, tiny_policy: Path, right: str = "take the key", both: bool = False) -> list[Episode]:
    """Write rollouts of each training task, with tokens as if the policy had drawn them: a success and a failure in turns, or
    `both` for each task."""
    chat, made = Chat(load_policy(tiny_policy).tokenizer), []
    for number, task in enumerate(task for task in letter_tasks(16) if task.split == "train"):
        for attempt, good in enumerate((True, False) if both else (number % 2 == 0,)):
            shown = as_external(demonstration(task, ("open the door", right if good else "put the key")), chat)
            shown.owner = [int(Owner.POLICY) if owner == Owner.EXTERNAL else owner for owner in shown.owner]
            shown.reward = shown.turns[-1].reward = float(good)
            made.append(replace(shown, episode_id=f"{task.task_id}/{attempt:04d}", policy_hash="", terminated=True))
    write_episodes(context.root / "data/rollouts/toy/episodes.parquet", made)
    return made


@pytest.mark.slow
def test_archer_learns_from_replayed_episodes(make_context, tiny_policy):
    """A policy that cloned recorded episodes takes the right action no more often than the wrong one. The critic learns which
    is right, and the policy from the critic; tokens are counted, and sampling and training agree."""
    cloning = {"records": ["rollouts"], "episodes": 24, "critic_updates": 1, "policy_updates": 5}
    settings = {"steps": 6, "learning_rate": 0.005, "settings": {"inv_temp": 0.001}}
    clone = make_context("rl", "clone", rl=section(algorithm="archer_offline", **settings, replay=cloning))
    store_rollouts(clone, tiny_policy, right="get the key", both=True)
    rl.run(clone)

    replay = {"episodes": 12, "critic_updates": 8, "policy_updates": 2}
    changes = {"steps": 7, "tasks_per_step": 12, "learning_rate": 0.002, "sampling": {"max_tokens": 8}}
    context = make_context("rl", rl=section(**changes, critic={"warmup_steps": 2, "learning_rate": 0.005}, replay=replay))
    start = context.root / "data/models/sft"
    start.unlink()
    start.symlink_to(clone.root / "data/models/rl/toy")
    history, report = run(context)
    before, after = (sum(row["success"] for row in rows) / 2 for rows in (history[:2], history[-2:]))
    assert after > max(0.85, before + 0.2)
    assert report["algorithm"] == "archer"
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["max_logprob_difference"] <= 1e-4
    # Two turns of 12 drawn episodes, twice a step, each action sampled anew with one to eight tokens.
    assert 5 * 2 * 24 <= report["ledger/policy_tokens_trained"] <= 5 * 2 * 24 * 8
    assert [row["replayed_turns"] for row in history] == [48.0 * (step + 1) for step in range(7)]
    assert all(row["td_error"] < 0.25 and abs(row["q_mean"]) < 1 for row in history)


def test_policy_is_unchanged_during_critic_warm_up(make_context, monkeypatch):
    """The policy's hash is that of the start policy until critic.warmup_steps are over."""
    seen: list[str] = []
    finish = online.OnlineJob.finish

    def watch(self, step, sums):
        state = self.models.policy.state_dict()
        seen.append(hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest())
        return finish(self, step, sums)

    monkeypatch.setattr(online.OnlineJob, "finish", watch)
    context = make_context("rl", rl=section(critic={"warmup_steps": 2}))
    start = load_policy(context.root / "data/models/sft").model.state_dict()
    history, report = run(context)
    before = hashlib.sha256(b"".join(start[name].numpy().tobytes() for name in sorted(start))).hexdigest()
    assert seen[:2] == [before, before]
    assert seen[2] != before
    assert [row["loss"] == row["loss"] for row in history] == [False, False, True]
    assert report["ledger/policy_tokens_trained"] > 0


def test_warmup_updates_train_the_critic_before_the_policy(make_context, tiny_policy, monkeypatch):
    """replay.warmup_updates: additional critic updates in the first step, all before the policy's first and without extra
    episodes; later steps have replay.critic_updates."""
    order: list[list[str]] = []
    updates = online.OnlineJob.updates

    def watch(self, step):
        order.append([])
        for update in updates(self, step):
            order[-1].append(update.learner)
            yield update

    monkeypatch.setattr(online.OnlineJob, "updates", watch)
    context = make_context("rl", rl=section(steps=2, replay={"records": ["rollouts"], "warmup_updates": 7}))
    store_rollouts(context, tiny_policy)
    history, report = run(context)
    assert order == [["turn_critic"] * 10 + ["policy"], ["turn_critic"] * 3 + ["policy"]]
    assert report["episodes"] == sum(row["episodes"] for row in history) == 2 * 12


@pytest.mark.parametrize(
    "changes",
    [
        {
            "advantage": {"token_baseline": True},
            "replay": {"capacity": 30, "records": ["rollouts", "demonstrations"], "samples": 2},
        },
        pytest.param(
            {"replay": {"actions": "played", "bootstrap_truncated": True}, "critic": {"head": {"loss": "c51"}}},
            marks=pytest.mark.slow,
        ),
        {"algorithm": "archer_offline", "critic": {"head": {"loss": "hl_gauss"}}},
        pytest.param(
            {"critic": {"distribution": {"spread_rate": 0.1}}, "replay": {"samples": 2}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"algorithm": "archer_offline", "replay": {"actions": "fresh", "value_target": "policy"}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resume_after_kill_writes_the_same_bytes(make_context, tiny_policy, changes: dict[str, Any]):
    """Contract: target network, replay, fresh actions, running spreads and the token baseline are the same after a kill."""
    sections = {"rl": section(**changes)}
    plain, killed = make_context("rl", "plain", **sections), make_context("rl", "killed", **sections)
    for context in (plain, killed):
        store_rollouts(context, tiny_policy)
    rl.run(plain)
    kill_at_step(killed, 2)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", **sections))
    assert outputs(killed.root) == outputs(plain.root)


@pytest.mark.parametrize("precision", slow_except(("float32", "bfloat16"), "float32"))
def test_played_actions_allow_several_policy_updates(make_context, other_precision, precision: str):
    """Contract: `actions: played` runs with every other switch at its default. A second batch has the same episodes and
    sampling probabilities, so that its ratio shows how far the first update has moved the policy."""
    resources = {"slots": 16, "threads": 1, "tokens_per_batch": 512, "precision": precision}
    found = {}
    for name, replay, loss in (("default", {}, {}), ("twice", {"policy_updates": 2}, {"kind": "ppo_clip"})):
        settings = {**RL, "steps": 2, "replay": {"actions": "played", "critic_updates": 2, **replay}, "loss": loss}
        history, report = run(make_context("rl", name, rl=settings, resources=resources))
        found[name] = (history, report["ledger/policy_tokens_trained"])
    assert found["default"][0][0]["ratio_max"] == pytest.approx(1.0, abs=0.3 if precision == "bfloat16" else 1e-4)
    assert found["twice"][0][0]["ratio_max"] > 1.01
    assert found["twice"][1] > 1.5 * found["default"][1]


@pytest.mark.slow
def test_archer_offline_learns_from_recorded_episodes(make_context, tiny_policy):
    """archer_offline: no rollouts; of two actions that are equally frequent in the data, the better becomes more likely."""
    replay = {"records": ["rollouts"], "episodes": 16, "critic_updates": 10, "policy_updates": 3}
    changes = {"steps": 6, "learning_rate": 0.005, "replay": replay}
    context = make_context("rl", rl=section(algorithm="archer_offline", settings={"inv_temp": 3.0}, **changes))
    rollouts = store_rollouts(context, tiny_policy)
    history, report = run(context)
    assert report["records"] == {"rollouts": 12}
    assert report["environment_steps"] == 0
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["ledger/policy_tokens_trained"] > 0
    assert history[-1]["td_error"] < history[0]["td_error"]
    assert history[-1]["kl"] > 0.01
    assert "success" not in history[0]
    model, chat = load_policy(context.root / "data/models/rl/toy").model, Chat(load_policy(tiny_policy).tokenizer)

    def likely(action: str) -> float:
        """Log-probability of `action` as the last one, summed over tasks without recorded episodes."""
        total = 0.0
        for task in (task for task in letter_tasks(16) if task.split == "valid"):
            episode = as_external(demonstration(task, ("open the door", action)), chat)
            mask = (torch.tensor([episode.turn]) == 1) & (torch.tensor([episode.owner]) == Owner.EXTERNAL)
            total += float(token_logprobs(model, torch.tensor([episode.token_ids]), mask).sum())
        return total

    assert sum(episode.reward for episode in rollouts) == 6
    assert likely("take the key") > likely("put the key") + 4 * 1.0


def test_missing_or_too_long_recorded_episodes_are_rejected(make_context, tiny_policy):
    context = make_context("rl", rl=section(algorithm="archer_offline", replay={"records": ["games"]}))
    with pytest.raises(ValueError, match=r"in games; toy has no game records: leave 'games' out; or add rollouts"):
        rl.run(context)
    tasks, chat = {task.task_id for task in letter_tasks(16) if task.split == "train"}, Chat(load_policy(tiny_policy).tokenizer)
    with pytest.raises(ValueError, match=r"over model\.max_length \(20\)"):
        read_offline_dataset(context.data, "toy", ["demonstrations"], tasks, chat, 20)
    found = read_offline_dataset(context.data, "toy", ["rollouts", "demonstrations", "games"], tasks, chat, 128)
    assert {kind: len(episodes) for kind, episodes in found.items()} == {
        "rollouts": 0,
        "demonstrations": len(found["demonstrations"]),
        "games": 0,
    }
    assert {episode.task_id for episode in found["demonstrations"]} == tasks
    assert all(episode.token_ids and episode.turns[0].end for episode in found["demonstrations"])
    write_episodes(
        context.root / "data/curated/toy/games.parquet",
        [replace(demonstration(task), policy_hash="player:a") for task in letter_tasks(4)],
    )
    assert len(read_offline_dataset(context.data, "toy", ["games"], tasks, chat, 128)["games"]) == 3


def test_oldest_episodes_are_evicted():
    """A capacity of 6 turns: played episodes are evicted oldest first, offline ones stay, and so does the newest, whatever its
    length."""
    offline = [make_episode("offline", "a", [1], 0.0)]
    replay = ReplayBuffer(offline, 6)
    replay.add([make_episode(f"{number}", "a", [1, 1], 0.0) for number in range(4)])
    assert [episode.episode_id for episode in replay.played] == ["1", "2", "3"]
    assert replay.turns == 7
    replay.add([make_episode("none", "a", [], 0.0), make_episode("long", "a", [1] * 9, 0.0)])
    assert [episode.episode_id for episode in replay.played] == ["long"]
    again = ReplayBuffer(offline, 6)
    again.load_state_dict(replay.state_dict())
    drawn = replay.draw(64, 1, "x")
    assert drawn == again.draw(64, 1, "x") != replay.draw(64, 1, "y")
    assert {episode.episode_id for episode in drawn} == {"offline", "long"}
    with pytest.raises(ValueError, match="replay buffer is empty"):
        ReplayBuffer([], 6).draw(1)


def test_sampled_turn_depends_only_on_history_and_key(tiny_policy):
    """Contract: turns sampled after histories of one episode equal those sampled in a separate session per history."""
    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer)
    episodes = [as_external(demonstration(task), chat) for task in letter_tasks(5)]
    sampling = Sampling(max_tokens=5)

    def engine() -> TorchEngine:
        return TorchEngine(policy.model, [chat.end_of_turn], 4, 128)

    requests = [
        ContinuationRequest(one.token_ids, [turn.start for turn in one.turns], [7 * row, 7 * row + 1])
        for row, one in enumerate(episodes)
    ]
    together = sample_turns(engine(), requests, sampling, 4)
    for row, one in enumerate(episodes):
        for place, turn in enumerate(one.turns):
            alone = engine()
            alone.request(alone.open(one.token_ids[: turn.start]), 7 * row + place, sampling)
            (expected,) = alone.advance()
            assert together[row][place].token_ids == expected.token_ids
            assert together[row][place].logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    backwards = sample_turns(engine(), requests[::-1], sampling, 9)[::-1]
    assert [[turn.token_ids for turn in row] for row in backwards] == [[turn.token_ids for turn in row] for row in together]
    assert [turn.token_ids for turn in sample_turns(engine(), requests[3:], sampling, 1)[1]] == [
        turn.token_ids for turn in together[4]
    ]


def test_two_processes_split_the_sampling(tiny_policy):
    """Contract: each of two processes samples turns of every other episode; gathered, they equal those of one process."""
    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer)
    episodes = [as_external(demonstration(task), chat) for task in letter_tasks(5)]
    algorithm = resolve(Rl.model_validate(RL))
    shared: list[list[list[Any]]] = []

    def drawn(gather: Callable[[list[Any]], list[Any]], index: int, count: int) -> list[list[Episode]]:
        processes = SimpleNamespace(index=index, count=count, gather=gather)
        models = SimpleNamespace(turn_critic=torch.nn.Linear(1, 1), processes=processes, refresh_player=lambda: None)
        engine = TorchEngine(policy.model, [chat.end_of_turn], 4, 128)
        off_policy = OffPolicy(models, algorithm, None, ReplayBuffer([], 1), engine, chat, 4, 128, 7)
        return off_policy.redraw(episodes, 2, 7, 0, "critic")

    def half(index: int, gather: Callable[[list[Any]], list[list[Any]]]) -> list[list[Episode]]:
        def joined(own: list[Any]) -> list[Any]:
            shared.append(gather(own))
            return [item for items in shared[-1] for item in items]

        return drawn(joined, index, 2)

    halves = as_processes(2, half)
    whole = drawn(lambda own: own, 0, 1)
    assert [len(own) for own in shared[-1]] == [3, 2]

    def tokens(found: list[list[Episode]]) -> list[list[list[int]]]:
        return [[made.token_ids for made in row] for row in found]

    assert tokens(halves[0]) == tokens(halves[1]) == tokens(whole)
    assert [len(row) for row in whole] == [2 * len(episode.turns) for episode in episodes]


def test_truncated_episodes_are_bootstrapped(tiny_policy):
    """bootstrap_truncated: the critic reads what the policy would have read before its next turn."""
    chat = Chat(load_policy(tiny_policy).tokenizer)
    whole = as_external(demonstration(letter_tasks(1)[0]), chat)
    first = whole.turns[0]
    cut = replace(whole, turns=[first], truncated=True, reward=0.0)
    for name in ("token_ids", "owner", "logprob", "turn"):
        setattr(cut, name, getattr(whole, name)[: first.end])
    assert isinstance(first, TurnRecord)
    on, off = (as_turns([whole, cut], trajectory_batch([whole, cut]), one, 128) for one in (chat, None))
    assert on.before.tolist() == [
        [first.start - 1, whole.turns[1].start - 1, -1],
        [first.start - 1, whole.turns[1].start - 1, -1],
    ]
    assert off.before[1].tolist() == [first.start - 1, -1, -1]
    assert on.token_ids[1, : whole.turns[1].start].tolist() == whole.token_ids[: whole.turns[1].start]
    assert on.bootstraps.tolist() == [[True, False], [True, False]]
    assert off.bootstraps.tolist() == [[True, False], [False, False]]
    assert on.rewards.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    full = as_turns([cut], trajectory_batch([cut]), chat, first.end)
    assert full.before.tolist() == [[first.start - 1, -1]]


def test_samples_hold_one_advantage_per_turn(make_context):
    """All policy tokens of a turn have the turn's advantage, environment tokens have none."""
    context = make_context("rl", rl=section(steps=1))
    run(context)
    for row in read_rows(context.root / "data/rl/toy/samples.parquet"):
        tokens = list(zip(row["advantages"], row["turn"], row["owner"], strict=True))
        assert all(value == 0 for value, _, owner in tokens if owner != Owner.POLICY)
        for number in range(len(row["turns"])):
            assert len({value for value, turn, owner in tokens if owner == Owner.POLICY and turn == number}) == 1
    assert read_episodes(context.root / "data/curated/toy/demonstrations.parquet")
    trained = load_file(context.root / "data/models/rl/toy/model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trained.values())


def test_evidence_that_is_trained_on_has_turns_like_others() -> None:
    """A turn of evidence between two others: with loss.evidence include, the critic bootstraps over all three."""
    made = make_episode("e", "a", [2, 2, 2], 1.0)
    second = slice(made.turns[1].start, made.turns[1].end)
    made.owner[second] = [int(Owner.EVIDENCE)] * 2
    for evidence, bootstraps in (("exclude", [[False, False, False]]), ("include", [[True, True, False]])):
        algorithm = resolve(Rl.model_validate({"algorithm": "archer", "loss": {"evidence": evidence}}), 64)
        parts = SimpleNamespace(algorithm=algorithm)
        turns = as_turns([made], OffPolicy._batch(parts, [made]), None, 64)
        assert turns.bootstraps.tolist() == bootstraps
