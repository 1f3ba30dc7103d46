"""On-policy self-distillation: advantages from a teacher that is the policy with a solution in its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import rl
from stages.agent.chat import Chat
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.teacher import Teacher, with_teacher
from stages.algorithms.settings import Rl
from stages.records.episode import EXPERT, Episode, Owner, write_episodes
from stages.runtime.resources import Resources
from stages.runtime.validation import ParamsError
from stages.training.common.batches import trajectory_batch
from stages.training.common.loop import make_processes
from stages.training.rl.models import Models
from stages.training.rl.self_teacher import SelfTeacher, solutions
from training.toys import KilledError, demonstration, kill_at_step, letter_tasks, make_episode, outputs, run, store_pairs

SECTION: dict[str, Any] = {
    "algorithm": "opsd",
    "steps": 3,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}


def make_solvable(make_context, name: str = "run", **section: Any):
    context = make_context("rl", name, rl={**SECTION, **section})
    episodes = [replace(demonstration(task), policy_hash=EXPERT) for task in letter_tasks(16)]
    write_episodes(context.root / "data/curated/toy/demonstrations.parquet", episodes)
    return context


FIRST = "take the key\nyou are in room 3"


def played(chat: Chat, name: str, turns: list[int], reward: float, before: Sequence[Mapping[str, str]] = ()) -> Episode:
    """An episode whose prompt is FIRST, after the messages `before`."""
    toy, prompt = make_episode(name, "a", turns, reward), chat.prompt(FIRST, examples=before)
    rest = slice(toy.owner.count(int(Owner.PROMPT)), None)
    return replace(
        toy,
        token_ids=[*prompt.token_ids, *toy.token_ids[rest]],
        owner=[*prompt.owner, *toy.owner[rest]],
        logprob=[*[0.0] * len(prompt.token_ids), *toy.logprob[rest]],
        turn=[*prompt.turn, *toy.turn[rest]],
        messages=[{"role": "user", "content": FIRST}],
    )


def test_advantages_by_hand() -> None:
    """outcome 0.25, GRPO's advantage 0.8, log-ratios 0.5 and -2 (clipped to -1): 0.2 + 0.75 * 0.5 and 0.2 - 0.75; a token that
    the teacher has not read keeps 0.2."""
    batch = trajectory_batch([make_episode("a", "a", [3], 1.0)])
    old = torch.tensor([[0.0, 0.0, -1.0, -2.0, -3.0]])
    batch = batch.with_(advantages=0.8 * batch.mask, logprobs_old=old)
    known = torch.tensor([[False, False, True, True, False]])
    found = with_teacher(batch.with_extra(Teacher(torch.tensor([[0.0, 0.0, -0.5, -4.0, 0.0]]), known)), 0.25, 1.0)
    assert found.advantages[0].tolist() == pytest.approx([0.0, 0.0, 0.575, -0.55, 0.2])
    assert found.metrics["teacher_gap"] == pytest.approx(-0.25)
    assert found.metrics["teacher_gap_success"] == pytest.approx(-0.25)
    assert "teacher_contrast" not in found.metrics, "there is no failure"
    assert found.metrics["teacher_unknown"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"no log-probabilities of a teacher; see Composition\.teacher"):
        with_teacher(batch, 0.0, 1.0)


def test_contrast_of_successes_and_failures() -> None:
    """Log-ratios 0.5 and 0.25 of a success and -0.75 of a failure: 0.375 + 0.75."""
    batch = trajectory_batch([make_episode("a", "a", [2], 1.0), make_episode("b", "a", [1], 0.0)])
    scores = torch.tensor([[0.0, 0.0, 0.0, -0.25], [0.0, 0.0, -1.25, 0.0]])
    batch = batch.with_(advantages=0.0 * batch.mask).with_extra(Teacher(scores, batch.mask))
    assert batch.logprobs_old[batch.mask].tolist() == [-0.5] * 3
    assert with_teacher(batch, 0.0, 5.0).metrics["teacher_contrast"] == pytest.approx(1.125)


def test_expected_gradient_is_that_of_the_reverse_divergence() -> None:
    """Summed over every token that the policy could draw, A log pi has the gradient of -KL(pi || pi_T)."""
    logits, teacher = torch.tensor([0.3, -1.0, 0.7], requires_grad=True), torch.tensor([1.0, 0.2, -0.5]).log_softmax(-1)
    logs = logits.log_softmax(-1)
    episodes = [make_episode(str(token), "a", [1], 1.0) for token in range(3)]
    batch = trajectory_batch(episodes)
    batch = batch.with_(
        advantages=torch.zeros(3, 3),
        logprobs_old=torch.zeros(3, 3).index_fill(1, torch.tensor([2]), 1.0) * logs.detach()[:, None],
    )
    scores = torch.zeros(3, 3)
    scores[:, 2] = teacher
    advantages = with_teacher(batch.with_extra(Teacher(scores, batch.mask)), 0.0, 10.0).advantages[:, 2]
    (estimate,) = torch.autograd.grad((logs.exp().detach() * advantages * logs).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((logs.exp() * (logs - teacher)).sum(), logits)
    assert torch.allclose(estimate, -exact, atol=1e-6)


def teacher_of(folder: Path, max_length: int = 128, **settings: Any) -> SelfTeacher:
    policy = load_policy(folder, attention="sdpa")
    method = resolve(Rl(algorithm="opsd", settings=settings))
    models = Models.make(method, policy.model, None, make_processes(Resources()), 512)
    return SelfTeacher(models, Chat(policy.tokenizer), method.rl.settings, {"a": "open the door\ntake the key"}, max_length)


def test_hint_joins_the_first_message_and_nothing_else_changes(tiny_policy: Path) -> None:
    teacher = teacher_of(tiny_policy)
    episode = played(teacher.chat, "e", [2, 1], 1.0)
    hinted, plain = teacher.hinted(episode), len(teacher.chat.prompt_tokens(FIRST))
    prompt = teacher.chat.prompt_tokens("take the key\nyou are in room 3\nOne way to solve it:\nopen the door\ntake the key")
    assert hinted.token_ids == [*prompt, *episode.token_ids[plain:]]
    assert hinted.owner == [int(Owner.PROMPT)] * len(prompt) + episode.owner[plain:]
    assert hinted.logprob[len(prompt) :] == episode.logprob[plain:]
    assert teacher.hinted(replace(episode, task_id="b")) is None, "no solution of task b is known"
    assert teacher_of(tiny_policy, max_length=len(prompt) + 3).hinted(episode) is None, "no room"
    assert teacher_of(tiny_policy, max_length=len(prompt) + 4).hinted(episode) is not None


def test_hint_leaves_messages_before_the_first_observation(tiny_policy: Path) -> None:
    """Contract: the teacher reads all that the policy read, also messages with which an outside agent began the conversation; it
    reads nothing of an episode whose first message is another."""
    teacher = teacher_of(tiny_policy)
    before = [{"role": "user", "content": "you are in room 1"}, {"role": "assistant", "content": "go"}]
    episode, told = played(teacher.chat, "e", [2], 1.0, before), f"{FIRST}\nOne way to solve it:\nopen the door\ntake the key"
    prompt = teacher.chat.prompt(told, examples=before).token_ids
    assert prompt[: len(teacher.chat.prompt_tokens(told))] != teacher.chat.prompt_tokens(told)
    assert teacher.hinted(episode).token_ids == [*prompt, *episode.token_ids[-2:]]
    assert teacher.hinted(replace(episode, token_ids=[5] * len(episode.token_ids))) is None


@pytest.mark.parametrize("weights", ["start", "current"])
def test_teacher_reads_the_same_tokens_after_the_hint(tiny_policy: Path, weights: str) -> None:
    """Contract: log-probabilities equal those of the model's own forward pass over each hinted episode, under the start's weights
    or the current ones."""
    teacher = teacher_of(tiny_policy, teacher=weights)
    with torch.no_grad():
        for parameter in teacher.models.policy.parameters():
            parameter.mul_(1.1)
    chat = teacher.chat
    episodes = [played(chat, "e", [2, 1], 1.0), replace(played(chat, "f", [1], 0.0), task_id="b"), played(chat, "g", [3], 0.0)]
    batch = trajectory_batch(episodes)
    found = teacher.annotate(batch, episodes, 0.7).get(Teacher)
    model = teacher.models.reference if weights == "start" else teacher.models.policy
    for row in (0, 2):
        hinted = teacher.hinted(episodes[row])
        with torch.no_grad():
            logs = (model(torch.tensor([hinted.token_ids])).logits[0] / 0.7).log_softmax(-1)
        places = [place for place, owner in enumerate(hinted.owner) if owner == Owner.POLICY]
        expected = torch.stack([logs[place - 1, hinted.token_ids[place]] for place in places])
        assert torch.allclose(found.logprobs[row, batch.mask[row]], expected, atol=1e-5)
    assert found.known.tolist() == (batch.mask & torch.tensor([[True], [False], [True]])).tolist()
    assert not bool((found.logprobs * ~found.known).any())


def test_method_trains_and_resumes_to_the_same_bytes(make_context) -> None:
    plain = make_solvable(make_context, "plain")
    history = run(plain)
    assert all(row["teacher_unknown"] == 0 and row["teacher_gap"] != 0 for row in history)
    killed = make_solvable(make_context, "killed")
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_solvable(make_context, "killed"))
    assert outputs(killed.root) == outputs(plain.root)


def test_outcomes_alone_are_grpo(make_context) -> None:
    """Contract: the reduction in the card, to the last bit of the policy."""
    files = []
    for name, section in (("opsd", {"settings": {"outcome": 1.0}}), ("grpo", {"algorithm": "grpo"})):
        context = make_solvable(make_context, name, **section)
        run(context)
        files.append((context.root / "data/models/rl/toy/model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_solutions_are_the_shortest_of_each_task(make_context, tmp_path: Path) -> None:
    tasks = letter_tasks(2)
    longer = replace(demonstration(tasks[0], ("wait", "open the door", "take the key")), policy_hash=EXPERT, episode_id="a")
    found = [longer, *(replace(demonstration(task), policy_hash=EXPERT) for task in tasks)]
    write_episodes(
        tmp_path / "demonstrations.parquet",
        [*found, replace(demonstration(tasks[1], ("go",)), episode_id="x", policy_hash="other")],
    )
    expected = "open the door\ntake the key"
    assert solutions("demonstrations", tmp_path, tmp_path, "toy") == {task.task_id: expected for task in tasks}
    context = make_context("rl", rl=SECTION)
    store_pairs(context)
    trees = solutions("trees", tmp_path, context.root / "data/annotated/toy", "toy")
    assert sorted(trees) == [f"t{number}" for number in range(6)]
    assert trees["t0"] == "1\n2"
    write_episodes(tmp_path / "demonstrations.parquet", [])
    with pytest.raises(ValueError, match=r"rl\.settings\.source: demonstrations has no solution of any task of toy"):
        solutions("demonstrations", tmp_path, tmp_path, "toy")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"settings": {"hint": "try this"}}, r"must have {solution}"),
        ({"external": {"per_group": 1}}, r"set per_group to 0, or algorithm to rl_plus"),
        ({"settings": {"teacher": "other"}}, r"start"),
        ({"tasks": {"source": "instructions"}}, r"opsd, whose teacher reads solutions, is about tasks that curate wrote"),
    ],
)
def test_invalid_settings_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl(algorithm="opsd", **section))


def test_teacher_reads_evidence_that_is_trained_on(tiny_policy: Path) -> None:
    teacher = teacher_of(tiny_policy)
    episode = played(teacher.chat, "e", [2, 1], 1.0)
    episode.owner[-1] = int(Owner.EVIDENCE)
    teacher.evidence = True
    batch = trajectory_batch([episode], True)
    assert torch.equal(teacher.annotate(batch, [episode], 0.7).get(Teacher).known, batch.mask)
