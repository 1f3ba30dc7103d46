"""stages.rl with the offline algorithms: the dataset, its batches, what the policy learns."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import rl
from stages.agent.chat import Chat
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.registry import composition, names
from stages.algorithms.settings import Rl
from stages.records.episode import IMPORTED, NOISY, Episode, Owner, read_tasks, write_episodes
from stages.training.common.loop import make_processes
from stages.training.rl.offline import OfflineJob
from stages.training.rl.offline_episodes import OfflineEpisode, kind_counts, offline_episodes
from stages.training.rl.offline_scores import read_reference
from stages.training.rl.sampler import EpochSampler
from stages.values.token_q import bounded, load_token_q
from training.toys import FirstLetterEnvironment, KilledError, demonstration, kill_at_step, letter_tasks, make_episode, outputs

RL: dict[str, Any] = {"steps": 4, "learning_rate": 0.003, "warmup_steps": 0, "checkpoint_every": 1, "settings": {"per_step": 8}}
OFFLINE = [name for name in names() if composition(name).data == "offline"]
RIGHT, WRONG = ("open the door", "take the key"), ("open the door", "put the lamp")


def played(episode: Episode, chat: Chat, number: int) -> Episode:
    """A demonstration's text as if the policy had sampled it."""
    encoded = chat.encode_demonstration(episode.messages)
    turns = [replace(turn, start=start, end=end) for turn, (start, end) in zip(episode.turns, encoded.spans, strict=True)]
    encoding: dict[str, Any] = {"token_ids": encoded.token_ids, "owner": encoded.owner, "turn": encoded.turn}
    return replace(
        episode, **encoding, logprob=[-1.0] * len(encoded.token_ids), turns=turns, episode_id=f"{episode.task_id}/{number}"
    )


def offline_context(make_context, name: str = "run", **section: Any):
    """A context with two rollouts of each training task, one successful and one failed."""
    context = make_context("rl", name, rl={**RL, **section})
    chat = Chat(load_policy(context.root / "data/models/sft").tokenizer)
    rollouts = []
    for task in letter_tasks(16):
        for number, actions in enumerate((RIGHT, WRONG)):
            episode = played(demonstration(task, actions), chat, number)
            if actions is WRONG:
                episode.turns[-1].reward = episode.reward = -0.5
            rollouts.append(episode)
    write_episodes(context.root / "data/rollouts/toy/episodes.parquet", rollouts)
    return context


def run(context) -> tuple[list[dict[str, str]], dict[str, Any]]:
    rl.run(context)
    with (context.root / "reports/rl/toy_history.csv").open() as handle:
        return list(csv.DictReader(handle)), json.loads((context.root / "reports/rl/toy.json").read_text())


@pytest.mark.parametrize("name", OFFLINE)
def test_every_offline_algorithm_trains_with_its_defaults(make_context, tiny_policy, name: str):
    """Contract: no rollouts; the ledger counts each episode's tokens once a step; token values, if any, are saved below the
    policy."""
    context = offline_context(make_context, algorithm=name)
    history, report = run(context)
    assert (report["algorithm"], report["environment_steps"]) == (name, 0)
    assert report["stored"] == {"real": 12, "other": 0, "own": 24}
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["ledger/policy_tokens_trained"] > 0
    trained, start = (load_file(folder / "model.safetensors") for folder in (context.root / "data/models/rl/toy", tiny_policy))
    assert any(not trained[tensor].equal(start[tensor]) for tensor in start)
    assert [float(row["stored"]) for row in history] == [8.0] * 4
    learns_values = (context.root / "data/models/rl/toy/value").exists()
    assert learns_values == (name == "b_coder")
    if learns_values:
        assert [bool(row["value_td"]) for row in history] == [True, True, True, False]
        assert [bool(row["td"]) for row in history] == [False, False, False, True]
        assert load_token_q(context.root / "data/models/rl/toy").scores([5, 6, 7], [[8, 9], [10]]).shape == (2,)
        assert set(report["recovered"]["by_return"]) == {"-0.5", "1"}


def test_b_coder_learns_to_rank_actions(make_context):
    """Contract: the value network's TD error falls, and its values come to correlate with returns; R~ ranks a task's successful
    episode above the failed one, and so does the saved model."""
    context = offline_context(
        make_context, algorithm="b_coder", steps=40, settings={"per_step": 16, "value_steps": 20, "value_learning_rate": 0.003}
    )
    _, report = run(context)
    assert report["value_td_last"] < report["value_td_first"]
    assert report["value_correlation_last"] > report["value_correlation_first"] + 0.2
    found = report["recovered"]
    assert found["by_return"]["1"]["reward"] > found["by_return"]["-0.5"]["reward"]
    assert found["accuracy"] > 0.9
    chat = Chat(load_policy(context.root / "data/models/sft").tokenizer)
    task = letter_tasks(1)[0]
    encoded = chat.encode_demonstration(demonstration(task).messages)
    start = encoded.spans[1][0]
    actions = [chat.assistant_tokens(actions[1]) for actions in (RIGHT, WRONG)]
    right, wrong = load_token_q(context.root / "data/models/rl/toy").scores(encoded.token_ids[:start], actions).tolist()
    assert right > wrong


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize("step", [2, 3])
def test_resume_after_kill_writes_the_same_bytes(make_context, name: str, step: int):
    """Killed in the value network's stage, or in the policy's, which uses the value network."""
    settings = {"per_step": 8, "value_steps": 2} if name == "b_coder" else {"per_step": 8}
    plain = offline_context(make_context, "plain", algorithm=name, settings=settings)
    rl.run(plain)
    killed = offline_context(make_context, "killed", algorithm=name, settings=settings)
    kill_at_step(killed, step)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(offline_context(make_context, "killed", algorithm=name, settings=settings))
    assert outputs(killed.root) == outputs(plain.root)


def job_of(make_context, name: str, tokens_per_batch: int = 512, folder: str = "run", **settings: Any) -> OfflineJob:
    context = offline_context(make_context, folder, algorithm=name, settings={"per_step": 8, **settings})
    resources = context.params.resources.model_copy(update={"tokens_per_batch": tokens_per_batch})
    context.params = context.params.model_copy(update={"resources": resources})
    policy = load_policy(context.root / "data/models/sft", attention="sdpa")
    algorithm = resolve(Rl(**{**RL, "algorithm": name, "settings": {"per_step": 8, **settings}}))
    domain = SimpleNamespace(make=FirstLetterEnvironment.in_folder)
    return OfflineJob(context, algorithm, policy, make_processes(resources), domain)


@pytest.mark.parametrize(("name", "step"), [("b_coder", 0), ("b_coder", 3), ("stored_pg", 0)])
def test_loss_and_gradient_are_independent_of_micro_batches(make_context, name: str, step: int):
    """Contract: whatever resources.tokens_per_batch is, loss and gradient are the same to float rounding."""
    found = []
    for tokens in (4096, 60):
        job = job_of(make_context, name, tokens, f"run-{tokens}")
        update = next(job.updates(step))
        total = 0.0
        for rows in update.micro_batches:
            for terms in update.loss(rows):
                terms.loss.backward()
                total += float(terms.loss.detach())
        module = job.learners[update.learner].module
        gradient = torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None])
        found.append((len(update.micro_batches), total, gradient))
    (parts, whole, one), (more, split, other) = found
    assert more > parts
    assert split == pytest.approx(whole, rel=1e-5)
    assert float((one - other).norm() / one.norm()) < 1e-4


def test_policy_starts_from_the_value_network(make_context):
    """Contract: at its first update the policy's log-probabilities are the SFT policy's and the residual is 0, so that Q is
    the value network's, token for token; a^ is the SFT policy's greedy token."""
    job = job_of(make_context, "b_coder", 4096, value_steps=1)
    next(job.updates(1))
    (rows,) = job.plan(range(len(job.episodes)))
    batch = job.batch.take(rows)
    scores = job.policy_scores(batch, rows, job.trained)
    assert torch.equal(scores.logprobs, batch.logprobs_ref)
    assert torch.equal(scores.best, batch.best_ref)
    assert torch.equal(scores.greedy, scores.best)
    assert not scores.residual.any()
    assert torch.equal(scores.value, job.base[torch.tensor(rows), : batch.mask.shape[1]])
    with torch.no_grad():
        expected = job.models.reference(batch.token_ids).logits.argmax(-1)
    assert torch.equal(batch.greedy[:, 1:][batch.mask[:, 1:]], expected[:, :-1][batch.mask[:, 1:]])
    mean = float(job.batch.returns.mean())
    torch.testing.assert_close(bounded(scores.value[batch.mask], 1.0), torch.full((int(batch.mask.sum()),), mean))


def test_greedy_ties_go_to_the_lowest_token() -> None:
    """Contract: a^ is the same token in every pass."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 0.0, 2.0]])
    taken, best, greedy = read_reference(logits, torch.tensor([3, 2, 0]))
    assert greedy.tolist() == [1, 0, 3]
    assert torch.equal(taken[:2], best[:2])
    assert float(taken[2]) < float(best[2])


def test_bound_below_the_returns_is_rejected(make_context):
    with pytest.raises(ValueError, match=r"r_max \(0\.5\).*a return of 1"):
        job_of(make_context, "b_coder", r_max=0.5)


def test_without_init_from_lm_the_policy_is_reinitialised(make_context):
    """The value network and a^ still come from the SFT policy."""
    with_, without = (job_of(make_context, "b_coder", 512, f"{init}", init_from_lm=init) for init in (True, False))
    pairs = list(zip(with_.models.policy.parameters(), without.models.policy.parameters(), strict=True))
    assert any(not torch.equal(one, other) for one, other in pairs)
    assert torch.equal(with_.batch.greedy, without.batch.greedy)
    again = job_of(make_context, "b_coder", 512, "again", init_from_lm=False)
    assert all(map(torch.equal, without.models.policy.parameters(), again.models.policy.parameters()))


def test_offline_dataset_by_kind(make_context):
    """Contract: `real` holds expert demonstrations, complete imported episodes and known successes; `other` the rest of what
    others did, each once; `own` the policy's rollouts. Imported parts of episodes, which have no return, are left out. Rewards
    are on the last token of their turn."""
    context = offline_context(make_context, algorithm="stored_pg")
    root = context.root
    tasks = {task.task_id: task for task in read_tasks(root / "data/curated/toy/tasks.parquet", "train")}
    shown = [demonstration(task) for task in tasks.values()]
    first = shown[0].task_id
    shown.append(replace(demonstration(tasks[first], ("open the box", "take the key")), episode_id="noisy", policy_hash=NOISY))
    for name, actions, more in (
        ("whole", ("open the lamp", "take the key"), {"terminated": True}),
        ("first", ("open the lamp",), {"reward": 0.0}),
        ("last", ("open the key", "take the key"), {"terminated": True, "inherited": 1}),
    ):
        shown.append(replace(demonstration(tasks[first], actions), episode_id=f"imported-{name}", policy_hash=IMPORTED, **more))
    write_episodes(root / "data/curated/toy/demonstrations.parquet", shown)
    lost = demonstration(tasks[first], WRONG)
    lost.turns[-1].reward = lost.reward = 0.0
    won = demonstration(tasks[first], ("take the box", "take the key"))
    games = [replace(one, episode_id=f"g{number}", policy_hash="player:novice") for number, one in enumerate((lost, won, won))]
    write_episodes(root / "data/curated/toy/games.parquet", games)
    chat = Chat(load_policy(root / "data/models/sft").tokenizer)
    known = {first: [("take the lamp", 1.0), ("put the key", -0.3), ("put the key", -0.3)]}
    domain = SimpleNamespace(make=FirstLetterEnvironment.in_folder, known_actions=lambda task: known.get(task.task_id, []))
    found = offline_episodes(root / "data", "toy", domain, tasks, chat, 128)
    assert {kind: len(all_) for kind, all_ in found.items()} == {"real": 15, "other": 3, "own": 24}
    returns = Counter(sum(one.rewards) for one in found["other"])
    assert returns == {1.0: 1, -0.3: 1, 0.0: 1}
    for episode in (*found["real"], *found["own"]):
        paid = [place for place, reward in enumerate(episode.rewards) if reward]
        assert paid == [len(episode.token_ids) - 1]
        assert episode.mask[-1]
        assert episode.token_ids[-1] == chat.end_of_turn
    one = next(one for one in found["real"] if len(one.token_ids) < 40 and "lamp" in chat.tokenizer.decode(one.token_ids))
    assert chat.tokenizer.decode(one.token_ids).startswith("<|user|>take the key\nyou are in room 0")
    short = offline_episodes(root / "data", "toy", domain, tasks, chat, len(one.token_ids))
    assert 0 < sum(map(len, short.values())) < sum(map(len, found.values()))
    with pytest.raises(ValueError, match=r"raise curate\.expert_demonstrations"):
        offline_episodes(root / "data", "toy", domain, {}, chat, 128)


def test_truncated_episode_ends_at_its_last_policy_token():
    """Contract: that token has the reward."""
    episode = make_episode("0", "a", [2, 3], 0.5)
    episode.append([7, 8], Owner.ENVIRONMENT, 1)
    stored = OfflineEpisode.of(episode, "own")
    assert len(stored.token_ids) == 2 + 2 + 1 + 3
    assert stored.rewards == (0.0,) * 7 + (0.5,)
    assert stored.mask == (False, False, True, True, False, True, True, True)


def test_number_of_episodes_per_kind() -> None:
    """By hand: 64 as 32, 16, 16; the share of an empty kind goes to the others; rounding loses none."""
    every = {"real": 9, "other": 9, "own": 9}
    assert kind_counts(every, 64, 0.5, 0.25) == {"real": 32, "other": 16, "own": 16}
    assert kind_counts({**every, "other": 0}, 64, 0.5, 0.25) == {"real": 43, "other": 0, "own": 21}
    assert kind_counts({**every, "real": 0, "own": 0}, 7, 0.5, 0.25) == {"real": 0, "other": 7, "own": 0}
    assert kind_counts({**every, "real": 0}, 7, 1.0, 0.0) == {"real": 0, "other": 4, "own": 3}
    for size in range(1, 20):
        assert sum(kind_counts(every, size, 0.5, 0.3).values()) == size


def test_every_episode_is_drawn_once_per_epoch() -> None:
    sampler = EpochSampler(6, 4, "key")
    drawn = [place for step in range(6) for place in sampler.batch(step)]
    assert [sorted(drawn[start : start + 6]) for start in range(0, 24, 6)] == [list(range(6))] * 4
    assert EpochSampler(6, 4, "key").batch(4) == drawn[16:20]
    assert drawn[:6] != drawn[6:12]
    assert EpochSampler(0, 0).batch(3) == []
