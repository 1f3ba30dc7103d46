"""Demonstrations in the policy's groups (rl_plus): tokens, old log-probabilities, counts, learning."""

from __future__ import annotations

import copy
import csv
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import rl
from stages.agent.chat import Chat
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.external import PolicyVocabulary
from stages.algorithms.settings import Rl
from stages.records.episode import IMPORTED, NOISY, Owner, read_episodes, read_rows, write_episodes
from stages.runtime.resources import Resources
from stages.training.common.batches import trajectory_batch
from stages.training.common.ledger import Ledger
from stages.training.common.loop import make_processes
from stages.training.rl.demonstrations import ExternalEpisodes, as_external
from stages.training.rl.models import Models
from stages.training.rl.offline_dataset import read_offline_dataset
from stages.training.rl.policy_updates import PolicyUpdates
from training.toys import FirstLetterEnvironment, demonstration, letter_tasks, make_episode

RL: dict[str, Any] = {
    "algorithm": "rl_plus",
    "steps": 2,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}


def run(context) -> tuple[list[dict[str, str]], dict[str, Any]]:
    rl.run(context)
    with (context.root / "reports/rl/toy_history.csv").open() as handle:
        return list(csv.DictReader(handle)), json.loads((context.root / "reports/rl/toy.json").read_text())


@pytest.fixture(scope="module")
def policy(tiny_policy):
    return load_policy(tiny_policy, attention="sdpa")


def external_batch(policy):
    """Two groups of two policy episodes and one demonstration; rows 4 and 5 are external."""
    shapes = [("a", [3, 2], 0.0), ("a", [1], 1.0), ("b", [4], 0.0), ("b", [2, 2, 1], 0.0)]
    own = [make_episode(f"{index}", *shape) for index, shape in enumerate(shapes)]
    chat, tasks = Chat(policy.tokenizer), letter_tasks(2)
    shown = [replace(as_external(demonstration(task), chat), group_id=name) for task, name in zip(tasks, "ab", strict=True)]
    return trajectory_batch([*own, *shown])


def test_demonstration_has_the_tokens_of_an_equal_rollout(policy):
    """Contract: the prompt has the policy's tokens; tokens that SFT would train are EXTERNAL; turns have their spans."""
    chat, task = Chat(policy.tokenizer), letter_tasks(1)[0]
    episode = as_external(demonstration(task), chat)
    prompt = chat.prompt_tokens(f"{task.prompt}\nyou are in room {task.seed}")
    assert episode.token_ids[: len(prompt)] == prompt
    assert set(episode.owner) == {int(Owner.PROMPT), int(Owner.EXTERNAL), int(Owner.ENVIRONMENT)}
    for turn in episode.turns:
        assert chat.action_text(episode.token_ids[turn.start : turn.end]) == turn.action
        assert set(episode.owner[turn.start : turn.end]) == {int(Owner.EXTERNAL)}
    batch = trajectory_batch([episode])
    assert batch.external is not None
    assert torch.equal(batch.external, batch.mask)
    assert not batch.policy_mask.any()
    assert trajectory_batch([make_episode("0", "a", [1], 0.0)]).external is None


def test_old_logprobs_of_demonstrations_are_the_policys(policy):
    """Contract: p_old of external tokens is the training pass's before the first update, that of policy tokens the sampler's."""
    batch = external_batch(policy)
    for share in (True, False):
        algorithm = resolve(Rl(algorithm="rl_plus", group_size=3, share_prefixes=share), 64)
        models = Models.make(algorithm, policy.model, None, make_processes(Resources()), 64)
        annotated = models.annotate(batch, algorithm)
        with torch.no_grad():
            expected = token_logprobs(policy.model, batch.token_ids, batch.mask)
        torch.testing.assert_close(annotated.logprobs_old[batch.external], expected[batch.external], rtol=0, atol=1e-5)
        assert torch.equal(annotated.logprobs_old[batch.policy_mask], batch.logprobs_old[batch.policy_mask])
        assert annotated.get(PolicyVocabulary).size == policy.model.config.vocab_size


def test_gradient_and_token_counts_are_independent_of_micro_batches(policy):
    found = []
    for tokens_per_batch in (4096, 1):
        model = copy.deepcopy(policy.model)
        algorithm = resolve(Rl(algorithm="rl_plus", group_size=3, share_prefixes=False), 64)
        models = Models.make(algorithm, model, None, make_processes(Resources()), tokens_per_batch)
        batch = algorithm.prepare(models.annotate(external_batch(policy), algorithm))
        ledger = Ledger()
        for update in PolicyUpdates(models, algorithm, ledger).updates(batch, 0, ("key",)):
            for rows in update.micro_batches:
                for terms in update.loss(rows):
                    terms.loss.backward()
                    update.on_tokens_trained(*terms.trained)
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        assert batch.external is not None
        assert ledger.external_tokens == int(batch.external.sum())
        assert ledger.policy_tokens == int(batch.policy_mask.sum())
        assert ledger.environment_tokens == 0
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_drawn_demonstrations_depend_only_on_the_key(policy):
    chat, tasks = Chat(policy.tokenizer), letter_tasks(3)
    shown = []
    for task in tasks[:2]:
        for number, action in enumerate(("take key", "take lamp", "take door")):
            plain = demonstration(task, ("open the door", action))
            shown.append(replace(plain, episode_id=f"{task.task_id}/{number}", policy_hash="expert" if number else NOISY))
    names = {task.task_id for task in tasks}

    def episodes(**external: Any) -> ExternalEpisodes:
        params = resolve(Rl(algorithm="rl_plus", external=external)).rl.external
        return ExternalEpisodes(shown, names, chat, params, 128)

    expert, all_ = episodes(per_group=2), episodes(per_group=2, source="all")
    assert [len(expert.by_task[name]) for name in sorted(names)[:2]] == [2, 2]
    assert len(all_.by_task[tasks[0].task_id]) == 3
    drawn = {tuple(one.episode_id for one in all_.draw(tasks[0].task_id, 1, "rl", step)) for step in range(8)}
    assert len(drawn) > 1
    assert all(len(ids) == 2 for ids in drawn)
    assert all_.draw("toy-000", 1, "rl", 3) == all_.draw("toy-000", 1, "rl", 3)
    assert (expert.count(tasks[2].task_id), expert.draw(tasks[2].task_id, 1)) == (0, [])
    with pytest.raises(ValueError, match="no demonstrations of source expert"):
        ExternalEpisodes(shown, {"other"}, chat, expert_params(), 128)
    with pytest.raises(ValueError, match=r"over model\.max_length \(8\)"):
        ExternalEpisodes(shown, names, chat, expert_params(), 8)


def expert_params():
    return resolve(Rl(algorithm="rl_plus")).rl.external


def test_groups_hold_a_demonstration_if_the_task_has_one(make_context):
    """Contract: demonstrations replace rollouts of the group; a task without one has rollouts only. Budget, success and samples
    refer to the policy's own episodes."""
    context = make_context("rl", rl={**RL, "steps": 1, "tasks_per_step": 12})
    path = context.root / "data/curated/toy/demonstrations.parquet"
    write_episodes(path, [episode for episode in read_episodes(path) if episode.task_id not in ("toy-000", "toy-001")])
    (row,), report = run(context)
    assert (float(row["external_episodes"]), float(row["episodes"])) == (10, 26)
    assert report["environment_steps"] == 52
    assert report["ledger/external_tokens_trained"] > 0
    assert report["ledger/environment_tokens_trained"] == 0
    samples = read_rows(context.root / "data/rl/toy/samples.parquet")
    sizes = {name: sum(sample["task_id"] == name for sample in samples) for name in {one["task_id"] for one in samples}}
    assert sorted(sizes.values()) == [2] * 10 + [3] * 2
    assert sizes["toy-000"] == sizes["toy-001"] == 3


class StrictEnvironment(FirstLetterEnvironment):
    """Succeeds if the second action is that of the demonstrations, which the tiny policy never samples."""

    def step(self, action: str):
        step = super().step(action)
        won = float(step.terminated and action == "take the key")
        return replace(step, reward=won, terms={"letter": won})


@pytest.mark.parametrize("u", [1.0, "vocabulary"])
def test_rl_plus_learns_without_any_success_of_its_own(make_context, monkeypatch, tiny_policy, u):
    """Without any success GRPO does not change the policy; the demonstration's advantage moves RL-PLUS towards it."""
    domain = SimpleNamespace(make=lambda folder: StrictEnvironment(), settings=SimpleNamespace(max_turns=2))
    for opened in ("load_domain", "open_domain"):
        monkeypatch.setattr(rl, opened, lambda name, settings: domain)
    context = make_context("rl", "plus", rl={**RL, "steps": 3, "learning_rate": 0.03, "external": {"u": u}})
    history, _ = run(context)
    assert all(float(row["success"]) == 0 for row in history[:1])
    probabilities = [float(row["external_probability"]) for row in history]
    assert probabilities[-1] > 1.5 * probabilities[0]
    if u == 1.0:
        plain = make_context("rl", "grpo", rl={**RL, "steps": 1, "algorithm": "grpo"})
        run(plain)
        trained, start = (load_file(folder / "model.safetensors") for folder in (plain.root / "data/models/rl/toy", tiny_policy))
        assert all(trained[name].equal(start[name]) for name in start)


def test_imported_parts_of_episodes_are_left_out(policy, tmp_path):
    """Contract: a row per turn (`--format turns`) has no return; replay would count each as a failure."""
    tasks = letter_tasks(2)
    names = {task.task_id for task in tasks}
    whole = [replace(demonstration(task), policy_hash=IMPORTED, terminated=True) for task in tasks]
    first = replace(demonstration(tasks[0], ("open the door",)), episode_id="first", policy_hash=IMPORTED, reward=0.0)
    last = replace(whole[0], episode_id="last", inherited=1)
    write_episodes(tmp_path / "curated/toy/demonstrations.parquet", [*whole, first, last])
    found = read_offline_dataset(tmp_path, "toy", ["demonstrations"], names, Chat(policy.tokenizer), 128)
    assert {episode.episode_id for episode in found["demonstrations"]} == {episode.episode_id for episode in whole}
