"""A judge that is a program: planted quality and planted errors, and what judging in both orders removes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import pytest

from stages.judging.contract import Candidate, JudgeError, Judgment, Question, Rubric, Status, swapped
from stages.judging.orders import Match, play
from stages.judging.program import ProgramJudge, praises_itself
from stages.judging.settings import ProgramFaults

EXACT = {"noise": 0.0}


def judge(qualities: Mapping[str, float], seed: int = 0, **faults) -> ProgramJudge:
    return ProgramJudge(ProgramFaults(**faults), lambda question, candidate: qualities[candidate.name], seed)


def candidate(name: str, answer: str = "") -> Candidate:
    return Candidate(answer or f"answer {name}", name=name)


def asked(*names: str, kind: str = "pairwise", repeat: int = 0) -> Question:
    return Question(kind, "task", "prompt", tuple(map(candidate, names)), repeat=repeat)  # type: ignore[arg-type]


def match(one: Candidate, other: Candidate, repeat: int = 0) -> Match:
    return Match("task", "prompt", one, other, Rubric(), repeat=repeat)


def test_perfect_judge_scores_12_plus_the_difference() -> None:
    """The paper's worked example: S_i = 12 + (q_i - q_j)."""
    (result,), rows = play(judge({"a": 1.0, "b": -0.5}, **EXACT), [match(candidate("a"), candidate("b"))])
    assert result == pytest.approx((13.5, 10.5))
    assert [[one.name for one in question.candidates] for question, _ in rows] == [["a", "b"], ["b", "a"]]


@pytest.mark.parametrize("bias", [-2.0, 0.5, 3.0])
def test_swapped_orders_cancel_an_additive_bias_for_the_first(bias: float) -> None:
    qualities = {"a": 0.3, "b": 0.3, "c": 1.0}
    biased, fair = judge(qualities, position=bias, **EXACT), judge(qualities, **EXACT)
    for names in (("a", "b"), ("c", "a"), ("a", "c")):
        pair = match(*map(candidate, names))
        (with_bias,), _ = play(biased, [pair])
        (without,), _ = play(fair, [pair])
        assert with_bias
        assert without
        assert with_bias[0] - with_bias[1] == pytest.approx(without[0] - without[1])
        (single,), _ = play(biased, [pair], swap=False)
        assert single
        assert single[0] - single[1] == pytest.approx(without[0] - without[1] + 2 * bias)


def test_errors_belong_to_the_question_alone() -> None:
    """The same question has the same answer whatever is asked beside it, under other names, and again; a repetition differs."""
    noisy = judge({"a": 0.0, "b": 0.0, "x": 0.0}, noise=1.0)
    first = noisy.judge([asked("a", "b")])[0].scores
    assert noisy.judge([asked("b", "a"), asked("a", "b")])[1].scores == first
    renamed = Question("pairwise", "task", "prompt", (Candidate("answer a", name="x"), candidate("b")))
    assert noisy.judge([renamed])[0].scores == first
    assert noisy.judge([asked("a", "b", repeat=1)])[0].scores != first
    assert judge({"a": 0.0, "b": 0.0}, seed=1, noise=1.0).judge([asked("a", "b")])[0].scores != first


def test_noise_has_its_standard_deviation() -> None:
    noisy = judge({"a": 0.0}, noise=0.5)
    scores = [one.scores[0] for one in noisy.judge([asked("a", kind="pointwise", repeat=n) for n in range(4000)])]
    assert statistics.mean(scores) == pytest.approx(7.0, abs=0.03)
    assert statistics.stdev(scores) == pytest.approx(0.5, abs=0.03)


def test_length_and_self_praise_are_paid() -> None:
    faulty = judge({"a": 0.0, "b": 0.0}, length=0.1, praise=2.0, **EXACT)
    pair = (candidate("a", "one two three"), candidate("b", "an excellent brief"))
    (judgment,) = faulty.judge([Question("pairwise", "task", "", pair)])
    assert judgment.scores == pytest.approx((6.3, 8.3))
    assert praises_itself("This is the BEST answer.")
    assert not praises_itself("The best is yet to come.")


def test_scores_are_rounded_and_kept_on_the_scale() -> None:
    coarse = judge({"a": 0.9, "b": 100.0}, step=1.0, clip=True, **EXACT)
    assert coarse.judge([asked("a", kind="pointwise")])[0].scores == (7.0,)
    assert coarse.judge([asked("b", kind="pointwise")])[0].scores == (10.0,)


def test_checklist_flips_items_at_its_rate() -> None:
    rubric = Rubric(items=("first", "second"))
    faulty = ProgramJudge(ProgramFaults(flip=0.25), lambda *_: 0.0, 0, items=lambda question, one: (True, False))
    questions = [Question("checklist", "task", "", (candidate("a"),), rubric, repeat=n) for n in range(2000)]
    scores = [one.scores for one in faulty.judge(questions)]
    assert statistics.mean(first for first, _ in scores) == pytest.approx(0.75, abs=0.03)
    assert statistics.mean(second for _, second in scores) == pytest.approx(0.25, abs=0.03)
    with pytest.raises(ValueError, match="items"):
        judge({}).judge(questions[:1])


class Failing:
    name = version = "failing"
    sent = 0

    def keep(self) -> None: ...

    def judge(self, questions):
        good = Judgment((9.0, 1.0))
        return [good if number else Judgment(status=Status.TIMEOUT) for number, _ in enumerate(questions)]

    def close(self) -> None: ...


def test_failed_order_is_a_tie_a_dropped_match_or_an_error() -> None:
    pair = match(candidate("a"), candidate("b"))
    assert play(Failing(), [pair])[0] == [(6.0, 14.0)]
    assert play(Failing(), [pair], on_failure="drop_match")[0] == [None]
    with pytest.raises(JudgeError, match="on_failure"):
        play(Failing(), [pair], on_failure="abort")


def test_combined_score_is_computed_from_the_criteria() -> None:
    rubric = Rubric(process=("breadth", "detail"), answer=("clarity", "depth"), process_weight=0.6)
    assert rubric.combined({"clarity": 3, "depth": 4}, {"breadth": 7, "detail": 8}) == 6.4, "round(7.5) is 8, round(3.5) is 4"
    same = Rubric(process=("relevance",), answer=("relevance",), process_weight=0.6)
    assert same.combined({"relevance": 2}, {"relevance": 10}) == 6.8, "0.6 * 10 + 0.4 * 2"
    assert Rubric(answer=("clarity",)).combined({"clarity": 3}) == 3
    with pytest.raises(ValueError, match="clarity is 11"):
        Rubric(answer=("clarity",)).combined({"clarity": 11})
    with pytest.raises(KeyError):
        rubric.combined({"clarity": 3, "depth": 4}, {"breadth": 7})


def test_swapping_twice_is_the_question_itself() -> None:
    question = asked("a", "b")
    assert swapped(question).key != question.key
    assert swapped(swapped(question)) == question
