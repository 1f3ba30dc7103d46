"""Self-imitation: which episodes are learned again, with what weight, and that a run with it resumes exactly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import rl
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.imitation import Imitation
from stages.algorithms.settings import Rl
from stages.records.episode import write_json
from stages.runtime.resources import Resources
from stages.runtime.validation import ParamsError
from stages.training.common.batches import trajectory_batch
from stages.training.common.loop import Update, make_processes
from stages.training.rl import online
from stages.training.rl.imitation import SelfImitation
from stages.training.rl.models import Models
from training.toys import KilledError, kill_at_step, make_episode, outputs, run

RL: dict[str, Any] = {
    "steps": 4,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}


@pytest.fixture
def imitation(tiny_policy) -> SelfImitation:
    """Its buffer has successes at tasks that the policy solves never (a), half the time (b) and always (c), and no failure."""
    algorithm = resolve(Rl(algorithm="grpo"), 64)
    models = Models.make(algorithm, load_policy(tiny_policy, attention="sdpa").model, None, make_processes(Resources()), 64)
    made = SelfImitation(models, Imitation(ratio=1.0, coef=0.5), 1.0)
    shapes = [("a", [3, 2], 1.0), ("b", [1], 1.0), ("c", [4], 1.0), ("d", [2, 2, 1], 0.0)]
    made.add([make_episode(*(f"{task}-0", task), turns, reward) for task, turns, reward in shapes], lambda one: one.reward)
    return made


SUCCESS = {"a": 0.0, "b": 0.5, "c": 1.0}


def better_by(episode) -> float:
    return episode.reward - SUCCESS[episode.task_id]


def test_only_successes_are_stored(imitation: SelfImitation):
    assert [episode.task_id for episode in imitation.buffer.played] == ["a", "b", "c"]


def test_loss_is_that_of_the_paper_in_expectation(imitation: SelfImitation):
    """Contract: episodes are drawn in proportion to max(R - b, 0), never those with b = R, and their loss is the mean negative
    log-probability of their tokens times the mean weight, (1 + 0.5 + 0) / 3, times coef."""
    (update,) = imitation.join(iter([Update("policy", [], lambda _: iter(()))]), 300, better_by, 7)
    drawn = imitation.buffer.draw(300, 7, "imitation", 0, weights=[1.0, 0.5, 0.0])
    counts = Counter(episode.task_id for episode in drawn)
    assert set(counts) == {"a", "b"}
    assert counts["a"] / 300 == pytest.approx(2 / 3, abs=0.08)
    batch = trajectory_batch(drawn)
    model = imitation.models.policy
    with torch.no_grad():
        logprobs = token_logprobs(model, batch.token_ids, batch.mask, 1.0)
    expected = -float(logprobs.sum() / batch.mask.sum()) * 0.5 * 0.5
    terms = [part for micro in update.micro_batches for part in update.loss(micro)]
    assert sum(float(one.loss.detach()) for one in terms) == pytest.approx(expected, rel=1e-4)
    assert all(one.trained is None for one in terms), "the ledger counts the step's own tokens only"
    assert imitation.metrics["imitation_weight"] == pytest.approx(0.5)
    assert imitation.metrics["imitation_tokens"] == float(batch.mask.sum())


def test_policy_updates_keep_their_own_micro_batches(imitation: SelfImitation):
    """Contract: the critic's updates pass through; without an update of the policy, one learns the drawn episodes alone."""
    seen: list[str] = []
    critic, policy = (Update(name, [name], lambda micro: iter(seen.append(micro) or [])) for name in ("critic", "policy"))
    first, second = imitation.join(iter([critic, policy]), 2, better_by, 1)
    assert first is critic
    assert len(second.micro_batches) > 1
    assert list(second.loss(second.micro_batches[0])) == []
    assert seen == ["policy"]
    passed, alone = imitation.join(iter([critic]), 2, better_by, 1)
    assert (passed, alone.learner) == (critic, "policy")
    assert list(imitation.join(iter([critic]), 2, lambda episode: 0.0, 1)) == [critic], "nothing is better than usual"


def test_rows_and_weights_change_and_resume_to_the_same_bytes(make_context):
    """Contract: the buffer is part of the checkpoint."""
    section = {**RL, "imitation": {"ratio": 1.0}}
    without = run(make_context("rl", "without", rl=RL))
    plain = make_context("rl", "plain", rl=section)
    history = run(plain)
    assert history[0]["success"] == without[0]["success"]
    assert history[1:] != without[1:]
    assert "imitation_loss" not in without[0]
    assert max(row["imitation_tokens"] for row in history) > 0
    report = json.loads((plain.root / "reports/rl/toy.json").read_text())
    own = json.loads((make_context("rl", "without", rl=RL).root / "reports/rl/toy.json").read_text())
    assert report["ledger/environment_tokens_trained"] == own["ledger/environment_tokens_trained"] == 0
    killed = make_context("rl", "killed", rl=section)
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", rl=section))
    assert outputs(killed.root) == outputs(plain.root)


def test_a_step_of_dead_groups_learns_earlier_successes(make_context, monkeypatch):
    """Contract: where every group of a step is dead, the stored successes are still learned."""
    played = online.OnlineJob.play

    def play(self, task_ids, step, greedy=False):
        episodes = played(self, task_ids, step, greedy)
        for number, episode in enumerate(episodes):
            episode.reward = episode.turns[-1].reward = float(step == 0 and number % 2 == 0)
        return episodes

    monkeypatch.setattr(online.OnlineJob, "play", play)
    context = make_context("rl", rl={**RL, "steps": 2, "imitation": {"ratio": 1.0}})
    first, second = run(context)
    assert second["dead_groups"] == second["groups"]
    assert (first["success"] > 0, second["success"]) == (True, 0.0)
    assert second["imitation_tokens"] > 0
    stopped = make_context("rl", "stopped", rl={**RL, "steps": 2})
    run(stopped)
    weights = [load_file(one.root / "data/models/rl/toy/model.safetensors") for one in (context, stopped)]
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_invalid_combinations_are_refused():
    for section, message in (
        ({"imitation": {"coef": 2.0}}, "rl.imitation.coef has no effect here"),
        ({"algorithm": "archer", "imitation": {"ratio": 1.0}}, "rl.imitation.ratio is above 0"),
        ({"algorithm": "dpo", "imitation": {"ratio": 1.0}}, "rl.imitation.ratio has no effect"),
        ({"add_tree_steps": True}, "rl.add_tree_steps has no effect without rl.environment_steps"),
        ({"algorithm": "dpo", "add_tree_steps": True}, "rl.add_tree_steps has no effect: algorithm dpo"),
    ):
        with pytest.raises(ParamsError, match=message):
            resolve(Rl(**section), 64)


def test_tree_steps_are_added_to_the_budget(make_context):
    """Contract: the budget grows by what annotate's trees cost, steps repeated to return to a state included."""
    context = make_context("rl", rl={**RL, "environment_steps": 20, "add_tree_steps": True, "steps": 10})
    write_json(context.root / "data/annotated/toy/costs.json", {"environment_steps": 18, "replayed_steps": 4})
    history = run(context)
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["budget"] == 38
    used = [row["environment_steps"] for row in history]
    assert sum(used[:-1]) < 38 <= sum(used)
