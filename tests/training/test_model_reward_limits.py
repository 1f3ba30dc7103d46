"""What RLMT and SALMON reduce to in their limits, and that a thought is trained on: paper by paper, in numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.agent.chat import Chat
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import Policy, load_policy
from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.loss import denominators, ppo_clip
from stages.algorithms.parts.preference import PairScores, dpo
from stages.algorithms.parts.reward import EpisodeRewards
from stages.algorithms.settings import Rl
from stages.judging.contract import Candidate, Question, Rubric
from stages.judging.extraction import reader
from stages.judging.fit_judge import alone, encoded, losses
from stages.judging.local import LocalJudge
from stages.judging.preferences import by_principles, by_quality, margins_of, pairs_of
from stages.judging.program import ProgramJudge
from stages.judging.settings import Extraction, JudgeModel, LocalParams, Principle, PrincipleSampling, ProgramFaults
from stages.records.episode import Episode, Owner, TurnRecord
from stages.records.thinking import Thinking
from stages.training.common.batches import trajectory_batch
from training.toys import make_episode


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Policy:
    return load_policy(tiny_policy)


def rlmt(**section: Any) -> Algorithm:
    return resolve(Rl.model_validate({"algorithm": "rlmt", **section}), 64)


def spoken(policy: Policy, name: str, text: str) -> Episode:
    """An episode of one turn in which the policy wrote `text`."""
    episode = Episode(name, "t", "toy", "g", 0, "", "", 1.0, 1.0, 0, terminated=True)
    episode.append([5, 6], Owner.PROMPT, -1)
    tokens = Chat(policy.tokenizer).tokens_of(text)
    episode.append(tokens, Owner.POLICY, 0, [-1.0] * len(tokens))
    episode.turns.append(TurnRecord(text, "", True, 0.0, 0.0, "", text, 2, 2 + len(tokens)))
    return episode


def prepared(method: Algorithm, episodes: list[Episode], rewards: list[float]) -> TrajectoryBatch:
    batch = trajectory_batch(episodes).with_extra(EpisodeRewards(torch.tensor(rewards)))
    found = method.prepare(method.shape(batch))
    return found.with_(logprobs_ref=found.logprobs_old)


def test_thoughts_have_a_gradient_and_prompts_have_none(policy: Policy) -> None:
    """d loss / d log pi differs from 0 on every token of a thought, its markers and the response; where all rewards are equal,
    the clipped loss has no gradient."""
    thought, answer = "<think>the key is in the box</think>", "take the key"
    episodes = [spoken(policy, f"e{place}", thought + answer) for place in range(2)]
    method = rlmt(loss={"entropy_coef": 0.0, "kl_coef": 0.0})
    for rewards, moves in (([1.0, 0.0], True), ([1.0, 1.0], False)):
        batch = prepared(method, episodes, rewards)
        logprobs = batch.logprobs_old.clone().requires_grad_()
        entropy = torch.zeros_like(logprobs)
        method.loss(logprobs, entropy, batch, denominators(batch, None)).loss.backward()
        assert logprobs.grad is not None
        moved = logprobs.grad != 0
        if not moves:
            assert not moved.any()
            continue
        assert moved.tolist() == batch.mask.tolist()
        within = len(Chat(policy.tokenizer).tokens_of(thought))
        assert moved[:, 2 : 2 + within].all()
        assert within > 10, "tokens of the thought"
        assert not moved[:, :2].any()


def test_gradients_reach_the_weights_through_the_thought_alone(policy: Policy) -> None:
    """The response's tokens masked out, the thought still moves the weights."""
    thought = "<think>the key is in the box</think>"
    episodes = [spoken(policy, f"e{place}", thought + "take the key") for place in range(2)]
    method = rlmt(loss={"entropy_coef": 0.0, "kl_coef": 0.0})
    batch = prepared(method, episodes, [1.0, 0.0])
    within = 2 + len(Chat(policy.tokenizer).tokens_of(thought))
    assert batch.advantages is not None
    only = batch.with_(advantages=batch.advantages * (torch.arange(batch.mask.shape[1]) < within))
    model = policy.model
    model.zero_grad()
    logprobs = token_logprobs(model, only.token_ids, only.mask)
    old = only.with_(logprobs_old=logprobs.detach())
    # One row: both rows are the same text, so that their gradients would cancel.
    (ppo_clip(logprobs, old, method.rl.loss)[0]).sum().backward()
    assert sum(float(one.grad.abs().sum()) for one in model.parameters() if one.grad is not None) > 0
    model.zero_grad()


def test_without_thinking_rlmt_is_rlhf_with_the_same_reward_model() -> None:
    """The judge reads the whole message, which is the action, and section `rl` is that of a judge without extraction."""
    read = reader(Extraction(marker=""), None)
    assert read("take the key") == "take the key"
    with_marks = reader(Extraction(), Thinking())
    assert with_marks("<think>why</think>take the key") == "take the key"
    plain, off = rlmt(judge={"extract": {"marker": ""}}).rl, rlmt().rl
    assert plain.judge.extract is not None
    same = plain.model_copy(update={"judge": off.judge})
    assert same == off


def test_exact_match_in_place_of_the_model_is_rlvr_with_reasoning() -> None:
    """Right responses after different thoughts: the advantages are GRPO's on outcomes."""
    read = reader(Extraction(), Thinking())
    said = ["<think>2 and 2</think>4", "<think>guess</think>5", "4", "<think>again</think>4"]
    outcomes = [float(read(text) == "4") for text in said]
    assert outcomes == [1.0, 0.0, 0.0, 1.0], "a message without the marker has no response"
    ours = prepared(rlmt(), [make_episode(f"e{place}", "g", [3], 0.0) for place in range(4)], outcomes)
    grpo = resolve(Rl.model_validate({"algorithm": "grpo"}), 64)
    episodes = [make_episode(f"e{place}", "g", [3], outcome) for place, outcome in enumerate(outcomes)]
    theirs = grpo.prepare(grpo.shape(trajectory_batch(episodes)))
    assert ours.advantages is not None
    assert theirs.advantages is not None
    assert torch.allclose(ours.advantages, theirs.advantages)


@pytest.mark.parametrize("gap", [0.1, 5.0])
def test_groups_of_two_move_as_pairs_of_dpo_do(gap: float) -> None:
    """Whatever the gap in reward, A = +-1 / sqrt(2): up the better, down the worse, token for token, as DPO's gradient at the
    reference is (-beta / 2, +beta / 2)."""
    batch = prepared(rlmt(), [make_episode(f"e{place}", "g", [3], 0.0) for place in range(2)], [gap, 0.0])
    logprobs = batch.logprobs_old.clone().requires_grad_()
    ppo_clip(logprobs, batch, rlmt().rl.loss)[batch.mask].sum().backward()
    assert logprobs.grad is not None
    grpo = logprobs.grad[batch.mask].reshape(2, 3)
    assert grpo.tolist() == [pytest.approx([-(0.5**0.5)] * 3, abs=1e-4), pytest.approx([0.5**0.5] * 3, abs=1e-4)]
    tokens = torch.full((2, 3), -1.0, requires_grad=True)
    sums, reference, lengths = tokens.sum(1, keepdim=True), torch.full((2, 1), -3.0), torch.full((1,), 3)
    scores = PairScores(*sums, *reference, lengths, lengths, torch.ones(1), torch.zeros(1))
    dpo(scores, resolve(Rl(algorithm="dpo")).rl.preference).sum().backward()
    assert tokens.grad is not None
    assert torch.allclose(tokens.grad / tokens.grad[1, 0], grpo / grpo[1, 0])


ONE = Principle(name="short", text="short", negative="long")


def compared() -> tuple[list[Question], ProgramJudge]:
    texts = {f"t{task}": [(f"{task}/{one}", "word " * (1 + (task + 2 * one) % 5)) for one in range(4)] for task in range(6)}
    answers = {task: [Candidate(text, name=name) for name, text in found] for task, found in texts.items()}
    questions = pairs_of(dict.fromkeys(answers, "write"), answers, JudgeModel(kind="reward"), 0)
    return questions, ProgramJudge(ProgramFaults(noise=0.0), lambda question, one: -float(len(one.answer.split())), 0)


def test_one_principle_without_negation_or_noise_is_a_reward_model_of_ai_feedback() -> None:
    """The same pairs with the same labels as the judge's own preferences; every prompt shows the one principle, as written."""
    questions, judge = compared()
    fixed = PrincipleSampling(items=[ONE], negate=0.0, label_noise=0.0, rule_label_noise=0.0, replicas=1)
    by_one = by_principles(questions, margins_of(judge, questions, fixed)[0], fixed, 0)
    plain = by_quality(questions, margins_of(judge, questions, None)[0])
    assert len(by_one) == len(plain) > 10
    for one, other in zip(by_one, plain, strict=True):
        assert one.question.candidates == other.question.candidates
        assert (one.prefers_first, one.clean, one.ruled) == (other.prefers_first, other.clean, False)
        assert one.question.rubric.principles == ("short",)
        assert other.question.rubric.principles == ()


def test_no_principles_in_the_prompt_is_a_plain_bradley_terry_model(policy: Policy) -> None:
    """The loss of a preference is -log sigmoid(r_w - r_l) of rewards that read question and answer alone."""
    questions, judge = compared()
    preference = by_quality(questions, margins_of(judge, questions, None)[0])[0]
    model = LocalJudge(policy, LocalParams(options=["a", "b"]), 128, logits=True)
    pair = encoded(model, "reward", preference)
    bare = [model.prompts(one)[0] for one in alone(preference.question)]
    assert [pair.one, pair.other] == bare
    by_principle = replace(preference.question, rubric=Rubric(principles=("short",)))
    shown = encoded(model, "reward", replace(preference, question=by_principle))
    assert shown.one != pair.one
    first, second = (judgment.scores[0] for judgment in model.judge(list(alone(preference.question))))
    better = first - second if preference.prefers_first else second - first
    loss = losses("reward", *(model.log_odds([row]) for row in bare), torch.tensor([pair.sign]))
    assert float(loss.detach()) == pytest.approx(math.log1p(math.exp(-better)), abs=1e-4)


def test_principles_that_are_one_rubric_are_a_pointwise_rubric_judge(policy: Policy) -> None:
    """A reward model that reads a principle scores as the same model that is asked for that criterion."""
    model = LocalJudge(policy, LocalParams(options=["a", "b"]), 128)
    answers = [Candidate("take the key"), Candidate("open the door")]
    ask = [Question("pointwise", "t", "where", (one,)) for one in answers]
    by_principle = model.judge([replace(one, rubric=Rubric(principles=("clarity",))) for one in ask])
    by_rubric = model.judge([replace(one, rubric=Rubric(answer=("clarity",))) for one in ask])
    assert [one.scores for one in by_principle] == [one.scores for one in by_rubric]
    assert by_principle[0].scores != by_principle[1].scores
