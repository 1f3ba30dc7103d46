"""A judge model fitted to preferences: the losses, what it learns, and how it reads principles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.agent.policy import Policy, load_policy
from stages.algorithms.parts.judge import Judge
from stages.judging.contract import Candidate, Question, Rubric
from stages.judging.fit_judge import alone, by_principle, encoded, fit_judge, losses, measured
from stages.judging.groups import Group, score_groups
from stages.judging.local import LocalJudge, prompt
from stages.judging.preferences import Preference
from stages.judging.settings import JudgeModel, LocalParams, Principle

WORDS = ("key", "lamp", "box", "door")
PRINCIPLES = [Principle(name="key", text="key", negative="lamp")]
SETTINGS = {"options": ["a", "b"], "learning_rate": 0.01, "batch_tokens": 1024}


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Policy:
    return load_policy(tiny_policy, attention="sdpa")


def compared(task: int, one: str, other: str, label: bool, principle: str = "") -> Preference:
    rubric = Rubric(principles=(principle,) if principle else ())
    question = Question("pairwise", f"t{task}", "open", (Candidate(one), Candidate(other)), rubric)
    return Preference(question, label, label)


def preferences(principles: bool = False) -> list[Preference]:
    """ "key" is better than any other word; with principles, "lamp" reverses that."""
    found = []
    for task in range(8):
        for word in WORDS[1:]:
            for text, label in (("key", True), ("lamp", False)) if principles else (("", True),):
                found += [compared(task, "key", word, label, text), compared(task, word, "key", not label, text)]
    return found


@pytest.mark.parametrize(("margin", "expected"), [(0.0, 0.6931), (1.0, 0.3133)])
def test_losses(margin: float, expected: float) -> None:
    """Equal rewards: 0.6931; a margin of 1: 0.3133. In both orders the mean of the two."""
    one, other = torch.tensor([0.5 + margin, 0.5]), torch.tensor([0.5, 0.5 + margin])
    assert losses("reward", one, other, torch.tensor([1.0, -1.0])).tolist() == pytest.approx([expected] * 2, abs=1e-4)
    asked, turned = torch.tensor([margin]), torch.tensor([-margin])
    assert losses("comparison", asked, turned, torch.tensor([1.0])).tolist() == pytest.approx([expected], abs=1e-4)


def test_a_position_bias_costs_the_comparison() -> None:
    biased = losses("comparison", torch.tensor([3.0]), torch.tensor([3.0]), torch.tensor([1.0]))
    assert float(biased) > float(losses("comparison", torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([1.0])))


@pytest.mark.parametrize("kind", ["reward", "comparison"])
def test_it_learns_the_labels_and_leaves_the_policy(policy: Policy, kind: str) -> None:
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    params = JudgeModel(kind=kind, epochs=8, **SETTINGS)
    judge, report = fit_judge(policy, preferences(), params, 128, 0, 1024)
    assert report.history[-1] < report.history[0]
    found = measured(judge, params.kind, preferences(), alpha=True)
    assert (found["accuracy"], found["kappa"]) == (1.0, 1.0)
    assert found["alpha"] == pytest.approx(1.0)
    assert found["brier"] < 0.15
    assert found["flip_rate"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    again, _ = fit_judge(policy, preferences(), params, 128, 0, 256)
    for one, other in zip(judge.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def test_a_judge_by_principles_is_turned_by_negation_and_a_plain_one_is_not(policy: Policy) -> None:
    params = JudgeModel(kind="reward", epochs=16, **SETTINGS)
    pairs = [one.question for one in preferences()]
    signs = [{"key": 1.0 if pair.candidates[0].answer == "key" else -1.0} for pair in pairs]
    reading, _ = fit_judge(policy, preferences(principles=True), params, 128, 0, 4096)
    plain, _ = fit_judge(policy, preferences(), params, 128, 0, 4096)
    found = by_principle(reading, "reward", pairs, signs, PRINCIPLES)["key"]
    assert found["accuracy"] > 0.9
    assert found["negated"] < 0.1
    unread = by_principle(plain, "reward", pairs, signs, PRINCIPLES)["key"]
    assert unread["negated"] > 0.5


@pytest.mark.parametrize("principle", ["", "short"])
@pytest.mark.parametrize("kind", ["reward", "comparison"])
def test_a_judge_is_asked_with_the_prompts_that_it_learnt(policy: Policy, kind: str, principle: str, monkeypatch) -> None:
    """Contract: training, the figures of the report and rl read one prompt, token for token."""
    judge = LocalJudge(policy, LocalParams(options=["a", "b"]), 128, logits=kind == "reward")
    preference = compared(0, "key", "lamp", True, principle)
    learnt = encoded(judge, kind, preference)  # type: ignore[arg-type]
    read: list[list[list[int]]] = []
    log_odds = LocalJudge._differences
    monkeypatch.setattr(LocalJudge, "_differences", lambda self, rows: (read.append(rows), log_odds(self, rows))[1])
    measured(judge, kind, [preference])  # type: ignore[arg-type]
    section = Judge(kind="local", scheme="pointwise" if kind == "reward" else "round_robin")
    group = Group("t0", "open", preference.question.candidates, principles=preference.question.rubric.principles)
    score_groups(judge, [group], section.scoring(), 0)
    assert read == [[learnt.one, learnt.other]] * 2


def test_rewards_are_linear_in_the_hidden_state(policy: Policy) -> None:
    """r = (w_yes - w_no) h at the prompt's last token."""
    judge = LocalJudge(policy, LocalParams(options=["a", "b"]), 128, logits=True)
    question = alone(compared(0, "key", "lamp", True, "short").question)[0]
    assert "short: a or b?" in prompt(question, ["a", "b"])
    (judgment,) = judge.judge([question])
    ids = torch.tensor(judge.prompts(question))
    with torch.no_grad():
        hidden = policy.model.base_model(input_ids=ids).last_hidden_state[0, -1]
    yes, no = (policy.model.get_output_embeddings().weight.detach()[judge.chat.tokens_of(option)[0]] for option in ("a", "b"))
    assert judgment.scores[0] == pytest.approx(float((yes - no) @ hidden), abs=1e-4)
    probability = LocalJudge(policy, LocalParams(options=["a", "b"]), 128).judge([question])[0].scores[0]
    assert probability == pytest.approx(10 / (1 + float(torch.exp(-(yes - no) @ hidden))), abs=1e-4)


def test_nothing_to_measure(policy: Policy) -> None:
    judge = LocalJudge(policy, LocalParams(options=["a", "b"]), 128)
    assert measured(judge, "reward", []) == {"pairs": 0.0}
