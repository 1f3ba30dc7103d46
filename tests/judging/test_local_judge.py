"""A local judge model: probabilities of its options in one pass, both orders averaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stages.agent.policy import load_policy
from stages.judging.contract import Candidate, Question, Rubric, swapped
from stages.judging.local import LocalJudge, prompt
from stages.judging.settings import LocalParams

OPTIONS = ["a", "b"]


@pytest.fixture(scope="module")
def judge(tiny_policy: Path) -> LocalJudge:
    return LocalJudge(load_policy(tiny_policy), LocalParams(options=OPTIONS, batch=2), 256)


def question(one: str, other: str) -> Question:
    return Question("pairwise", "task", "open the box", (Candidate(one), Candidate(other)))


def option_logits(judge: LocalJudge, text: str) -> torch.Tensor:
    ids = judge.chat.prompt_tokens(text)
    with torch.no_grad():
        logits = judge.model(input_ids=torch.tensor([ids])).logits[0, -1]
    return logits[[judge.chat.tokens_of(option)[0] for option in OPTIONS]]


def test_score_is_the_options_probability_over_both_orders(judge: LocalJudge) -> None:
    asked = question("go north", "take the lamp now")
    one, other = (option_logits(judge, prompt(item, OPTIONS)) for item in (asked, swapped(asked)))
    expected = 1 / (1 + math.exp(-float((one[0] - one[1]) - (other[0] - other[1])) / 2))
    (judgment,) = judge.judge([asked])
    assert judgment.scores == pytest.approx((10 * expected, 10 - 10 * expected), abs=1e-4)
    assert judgment.cost.calls == 2


def test_order_does_not_matter(judge: LocalJudge) -> None:
    asked = question("go north", "take the lamp now")
    one, other = judge.judge([asked, swapped(asked)])
    assert one.scores == pytest.approx(other.scores[::-1], abs=1e-5)
    assert judge.judge([question("go", "go")])[0].scores == pytest.approx((5, 5), abs=1e-5)


def test_neighbours_and_padding_do_not_matter(judge: LocalJudge) -> None:
    questions = [question("go", "go north " * length) for length in (1, 9, 3)]
    together = judge.judge(questions)
    for item, judgment in zip(questions, together, strict=True):
        assert judge.judge([item])[0].scores == pytest.approx(judgment.scores, abs=1e-5)


def test_pointwise_and_checklists(judge: LocalJudge) -> None:
    rubric = Rubric(items=("short", "polite"))
    kinds = [
        Question("pointwise", "task", "open the box", (Candidate("go"),)),
        Question("checklist", "task", "open the box", (Candidate("go"),), rubric),
        question("go", "take"),
    ]
    point, items, pair = judge.judge(kinds)
    assert len(point.scores) == 1
    assert 0 < point.scores[0] < 10
    assert set(items.scores) <= {0.0, 1.0}
    assert (len(items.scores), items.cost.calls, len(pair.scores)) == (2, 2, 2)


@pytest.mark.parametrize("options", [["a", "a"], ["search answer", "b"]])
def test_options_must_be_two_single_tokens(tiny_policy: Path, options: list[str]) -> None:
    with pytest.raises(ValueError, match="single tokens"):
        LocalJudge(load_policy(tiny_policy), LocalParams(options=options), 256)


def test_version_names_weights_and_options(judge: LocalJudge, tiny_policy: Path) -> None:
    other = LocalJudge(load_policy(tiny_policy), LocalParams(options=["b", "a"]), 256)
    assert other.version != judge.version
