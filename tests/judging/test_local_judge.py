"""A local judge model: probabilities of its options in one pass."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch

from stages.agent.policy import load_policy
from stages.judging.contract import Candidate, Question, Rubric, Status, swapped
from stages.judging.local import LocalJudge, prompt
from stages.judging.measures import order_measures
from stages.judging.orders import Match, play
from stages.judging.preferences import both_orders, by_quality, margins_of
from stages.judging.settings import LocalParams
from stages.judging.table import judgment_row

OPTIONS = ["a", "b"]


@pytest.fixture(scope="module")
def judge(tiny_policy: Path) -> LocalJudge:
    return LocalJudge(load_policy(tiny_policy), LocalParams(options=OPTIONS, batch=2), 256)


def question(one: str, other: str) -> Question:
    return Question("pairwise", "task", "open the box", (Candidate(one), Candidate(other)))


def matched(one: str, other: str) -> Match:
    return Match("task", "open the box", Candidate(one, name=one), Candidate(other, name=other), Rubric())


def option_logits(judge: LocalJudge, text: str) -> torch.Tensor:
    ids = judge.chat.prompt_tokens(text)
    with torch.no_grad():
        logits = judge.model(input_ids=torch.tensor([ids])).logits[0, -1]
    return logits[[judge.chat.tokens_of(option)[0] for option in OPTIONS]]


def test_scores_are_the_options_probabilities_in_the_order_shown(judge: LocalJudge) -> None:
    asked = question("go north", "take the lamp now")
    for item in (asked, swapped(asked)):
        first, second = option_logits(judge, prompt(item, OPTIONS))
        share = 1 / (1 + math.exp(-float(first - second)))
        (judgment,) = judge.judge([item])
        assert judgment.scores == pytest.approx((10 * share, 10 - 10 * share), abs=1e-4)
        assert judgment.cost.calls == 1, "one pass"


def test_a_match_is_two_passes_and_decided_by_the_mean_margin(judge: LocalJudge) -> None:
    """Contract: a match takes a call per order, as of every judge; S_1 > S_2 if s_12 + s_21 > 0, whatever the position adds."""
    texts = ("go north", "take the lamp now", "open", "wait here and look")
    before = judge.sent
    for one, other in combinations(texts, 2):
        match = matched(one, other)
        ((first, second),), asked = play(judge, [match])
        ((as_asked, turned),) = judge.margins([question(one, other)])
        assert [judgment.cost.calls for _, judgment in asked] == [1, 1]
        assert first + second == pytest.approx(20)
        assert (first > second) == (as_asked + turned > 0)
        assert first == pytest.approx(10 / (1 + math.exp(-as_asked)) + 10 / (1 + math.exp(-turned)), abs=1e-4)
    assert judge.sent - before == 6 * 2 * 2, "two by play and two by margins"


def test_order_measures_are_those_of_the_margins(judge: LocalJudge) -> None:
    """Contract: a judge that follows positions flips: its rows are by order, as those of every judge."""
    texts = ("go north", "take the lamp now", "open", "wait here and look")
    matches = [matched(one, other) for one, other in combinations(texts, 2)]
    _, asked = play(judge, matches)
    found = order_measures([judgment_row(judge, *pair) for pair in asked])
    margins = judge.margins([match.question(True) for match in matches])
    assert found["pairs"] == 6
    assert found["flip_rate"] == sum((one > 0) != (other > 0) for one, other in margins) / 6
    bias = [10 * (1 / (1 + math.exp(-one)) - 1 / (1 + math.exp(-other))) for one, other in margins]
    assert found["position_bias"] == pytest.approx(sum(bias) / 6, abs=1e-3)
    assert found["position_bias"] != 0
    _, rows = both_orders(judge, [match.question(True) for match in matches])
    assert order_measures([judgment_row(judge, *pair) for pair in rows])["flip_rate"] == found["flip_rate"]


def test_neighbours_do_not_matter(tiny_policy: Path) -> None:
    """Contract: the same question always gets the same answer, to the last bit."""
    alone = LocalJudge(load_policy(tiny_policy), LocalParams(options=OPTIONS), 256)
    questions = [question("go", "go north " * length) for length in (1, 9, 3, 1)] + [
        Question("pointwise", "task", "open the box", (Candidate("go " * length),)) for length in (2, 30, 2)
    ]
    together = alone.judge(questions)
    for item, judgment in zip(questions, together, strict=True):
        assert alone.judge([item])[0].scores == judgment.scores
    assert [judgment.cost.calls for judgment in together] == [1, 1, 1, 0, 1, 1, 0], "equal prompts are read once"


def test_equal_prompts_have_equal_scores_in_batches(judge: LocalJudge) -> None:
    """Contract: a group whose responses are all missing has no advantages, however prompts are padded."""
    missing = [Question("pointwise", f"task {n}", "open", (Candidate("[NULL]"),)) for n in range(7)]
    others = [Question("pointwise", f"task {n}", "open", (Candidate("look " * n),)) for n in range(7)]
    mixed = [one for pair in zip(missing, others, strict=True) for one in pair]
    assert len({judgment.scores for judgment in judge.judge(mixed)[::2]}) == 1


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
    asked_for = [prompt(kinds[0], OPTIONS, ", ".join(rubric.answer)).rpartition("\n")[2]]
    asked_for += [prompt(kinds[1], OPTIONS, item).rpartition("\n")[2] for item in rubric.items]
    assert asked_for == ["relevance, feasibility, details, clarity: a or b?", "short: a or b?", "polite: a or b?"]


@pytest.mark.parametrize("raw", [False, True])
def test_a_broken_model_s_judgments_are_nonsense_and_cost_nothing_else(tiny_policy: Path, raw: bool) -> None:
    """Contract: log-odds that are no numbers lose nothing and are counted: no reward, label or verdict follows from them."""
    broken = LocalJudge(load_policy(tiny_policy), LocalParams(options=OPTIONS), 256, logits=raw)
    with torch.no_grad():
        next(broken.model.parameters()).fill_(math.nan)
    kinds = [
        Question("pointwise", "task", "open the box", (Candidate("go"),)),
        Question("checklist", "task", "open the box", (Candidate("go"),), Rubric(items=("short",))),
        question("go", "take"),
    ]
    judgments = broken.judge(kinds)
    assert {(one.status, one.scores, one.reason) for one in judgments} == {
        (Status.NONSENSE, (), "log-odds nan: is the model broken?")
    }
    assert [one.cost.calls for one in judgments] == [1, 1, 1]
    results, asked = play(broken, [matched("go", "take")])
    assert results == [(10.0, 10.0)], "a tie"
    assert order_measures([judgment_row(broken, *pair) for pair in asked])["failures"] == 1.0
    margins, asked = margins_of(broken, [question("go", "take")], None)
    assert by_quality([question("go", "take")], margins) == []
    assert {judgment.status for _, judgment in asked} == {Status.NONSENSE}


@pytest.mark.parametrize("options", [["a", "a"], ["search answer", "b"]])
def test_options_must_be_two_single_tokens(tiny_policy: Path, options: list[str]) -> None:
    with pytest.raises(ValueError, match="single tokens"):
        LocalJudge(load_policy(tiny_policy), LocalParams(options=options), 256)


def test_version_names_whatever_changes_answers(judge: LocalJudge, tiny_policy: Path) -> None:
    policy = load_policy(tiny_policy)
    others = [
        LocalJudge(policy, LocalParams(options=["b", "a"]), 256),
        LocalJudge(policy, LocalParams(options=OPTIONS), 128),
        LocalJudge(policy, LocalParams(options=OPTIONS), 256, logits=True),
    ]
    assert len({one.version for one in [judge, *others]}) == 4
    assert LocalJudge(policy, LocalParams(options=OPTIONS), 256).version == judge.version
