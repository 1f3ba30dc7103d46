"""Preferences by principles: the paper's numbers, the reference code's sampling, and the shaped reward."""

from __future__ import annotations

import statistics
from random import Random

import pytest
from pydantic import ValidationError

from stages.judging.contract import Candidate, Question, Rubric
from stages.judging.preferences import by_principles, by_quality, margins_of, pairs_of
from stages.judging.principles import (
    decide,
    drawn_count,
    language_rule,
    phrase_rule,
    sampled,
    shaped,
    signed,
    spreads,
    texts,
    weights,
)
from stages.judging.program import ProgramJudge
from stages.judging.replies import messages
from stages.judging.settings import JudgeModel, LengthBonus, Principle, PrincipleSampling, ProgramFaults, SampledPrinciples

DRAWS = 8000


def principle(name: str, **keys) -> Principle:
    return Principle(name=name, text=f"more {name}", negative=f"less {name}", **keys)


def sampling(*names: str, **keys) -> PrincipleSampling:
    exact = {"label_noise": 0.0, "rule_label_noise": 0.0, "negate": 0.0}
    return PrincipleSampling(items=[principle(name) for name in names], **{**exact, **keys})


@pytest.mark.parametrize(
    ("margin", "spread", "expected"), [((2.0, 1.0), 4.0, 0.375), ((2.0, -1.0), 4.0, 0.0), ((-3.0, -1.0), 2.0, -1.0)]
)
def test_signed_scores(margin: tuple[float, float], spread: float, expected: float) -> None:
    assert signed(margin, spread) == expected


def test_without_the_filter_disagreement_decides() -> None:
    assert signed((2.0, -1.0), 4.0, agreement=False) == 0.125


class Scripted(Random):
    """Shuffles alphabetically; the draws given, in order, then 0.9."""

    def __init__(self, *draws: float) -> None:
        super().__init__(0)
        self.draws = list(draws)

    def shuffle(self, x, *_) -> None:
        x.sort()

    def random(self) -> float:
        return self.draws.pop(0) if self.draws else 0.9


def test_the_largest_score_decides_and_negation_turns_it() -> None:
    """0.375 and -1.0 together: the second decides, answer 2; with the second negated: answer 1."""
    both = sampling("a", "b", geometric=0.2, negate=0.5)
    # the number of principles, then for each whether it is negated, then the noise
    plain, turned = (decide({"a": 0.375, "b": -1.0}, both, Scripted(0.5, 0.9, negated)) for negated in (0.9, 0.1))
    assert plain is not None
    assert turned is not None
    assert plain.shown == (("a", False), ("b", False))
    assert (plain.first, turned.first) == (False, True)
    assert texts(both.items, turned.shown) == ("more a", "less b")


def test_position_bias_leaves_the_mean_and_adds_its_square_to_the_variance() -> None:
    """Constant bias B: s12 + B, s21 - B; equal mean order differences make the variance grow by B^2, so g shrinks; a bias above
    the margin is undecided."""
    fair = [{"a": (1.0, 1.0)}, {"a": (-1.0, -1.0)}]
    biased = [{"a": (one + 0.5, other - 0.5)} for one, other in (pair["a"] for pair in fair)]
    assert spreads(fair, "variance")["a"] == 1.0
    assert spreads(biased, "variance")["a"] == 1.25
    assert signed(biased[0]["a"], 1.25) == 0.8 * signed(fair[0]["a"], 1.0)
    assert signed((1.0 + 1.5, 1.0 - 1.5), 1.0) == 0.0


def test_divisors() -> None:
    margins = [{"a": (4.0, 4.0)}, {"a": (0.0, 0.0)}]
    assert [spreads(margins, kind)["a"] for kind in ("variance", "std", "none")] == [4.0, 2.0, 1.0]
    assert spreads([{"a": (1.0, 1.0)}], "variance") == {"a": 1.0}, "no spread divides by 1"


def test_number_of_principles() -> None:
    """Geometric(0.2) until at most 8: P(1) = 0.2 / (1 - 0.8^8) = 0.240, mean 3.39."""
    rng = Random(1)
    found = [drawn_count(rng, 0.2, 8) for _ in range(DRAWS)]
    assert found.count(1) / DRAWS == pytest.approx(0.240, abs=0.02)
    assert statistics.fmean(found) == pytest.approx(3.39, abs=0.1)
    assert drawn_count(rng, 1.0, 8) == 1


@pytest.mark.parametrize(("rule", "share"), [(None, 0.10), (True, 0.25)])
def test_label_noise(rule: bool | None, share: float) -> None:
    params = sampling("a", label_noise=0.10, rule_label_noise=0.25)
    rng, flipped = Random(2), 0
    for _ in range(DRAWS):
        decision = decide({"a": 1.0}, params, rng, rule)
        assert decision is not None
        assert decision.clean
        flipped += not decision.first
    assert flipped / DRAWS == pytest.approx(share, abs=0.02)


def test_undecided_pairs_have_no_preference_unless_a_rule_decides() -> None:
    assert decide({"a": 0.0}, sampling("a"), Random(0)) is None
    decision = decide({"a": 0.0}, sampling("a"), Random(0), rule=False)
    assert decision is not None
    assert (decision.first, decision.ruled) == (False, True)


def test_stock_phrases_lose_half_of_the_time() -> None:
    params = sampling("a", stock_phrases=["as an AI"])
    rng = Random(3)
    found = [phrase_rule("As an AI, no", "yes", params, rng) for _ in range(2000)]
    assert set(found) == {False, None}
    assert found.count(False) / 2000 == pytest.approx(0.5, abs=0.04)
    assert phrase_rule("as an AI", "as an ai", params, rng) is None


SALMON_WEIGHTS = {"Candor": 4.0, **{f"p{number}": 23 / 13 for number in range(13)}}
"""14 principles whose weights sum to 27."""


def test_principles_of_a_task_are_drawn_by_weight() -> None:
    """P(first = Candor) = 4 / 27; with 128 added to two of 14 principles of weight 27 in all, 258 / 283 for those with weight 2
    together."""
    plain = SampledPrinciples(items=[principle(name, weight=weight) for name, weight in SALMON_WEIGHTS.items()])
    rng = Random(4)
    drawn = [sampled(plain, 1, rng) for _ in range(DRAWS)]
    assert all(len(set(names)) == 3 for names in drawn)
    assert sum(names[0] == "Candor" for names in drawn) / DRAWS == pytest.approx(4 / 27, abs=0.02)
    items = [principle("r1"), principle("r2"), *(principle(f"q{number}", weight=25 / 12) for number in range(12))]
    tagged = SampledPrinciples(items=items, bonus={"r1": 128.0, "r2": 128.0})
    drawn = [sampled(tagged, 1, rng) for _ in range(DRAWS)]
    assert sum(names[0] in ("r1", "r2") for names in drawn) / DRAWS == pytest.approx(258 / 283, abs=0.02)


def test_principles_may_hold_always_and_begin_later() -> None:
    given = SampledPrinciples(items=[principle("a"), principle("b", always=True), principle("c", from_step=3, always=True)])
    assert sampled(given, 2, Random(0)) == ("a", "b")
    assert sampled(given, 3, Random(0)) == ("a", "b", "c")
    assert weights(given, 3) == {"a": 1.0}


@pytest.mark.parametrize(
    ("tokens", "stopped", "rate", "expected"),
    [(1000, False, 1.0, 1.2 + 4.0 - 6.0), (512, True, 1.0, 1.2 + 2.5), (512, True, -0.4, 1.2 - 1.0)],
)
def test_shaped_reward(tokens: int, stopped: bool, rate: float, expected: float) -> None:
    assert shaped(1.2, tokens, stopped, LengthBonus(rate=rate), 6.0) == pytest.approx(expected)
    assert shaped(1.2, tokens, True, None, 6.0) == 1.2


ANSWERS = {"t": [Candidate(f"answer {number}", name=f"e{number}") for number in range(5)]}


def program(position: float = 0.0) -> ProgramJudge:
    """Prefers higher numbers under "more a" and lower ones under "more b"."""

    def quality(question: Question, one: Candidate) -> float:
        number = float(one.name[1:])
        return -number if question.rubric.principles == ("more b",) else number

    return ProgramJudge(ProgramFaults(noise=0.0, position=position), quality, 0)


def test_preferences_follow_the_principle_shown() -> None:
    params = sampling("a", "b", geometric=1.0, negate=0.5, replicas=6)
    pairs = pairs_of({"t": "task"}, ANSWERS, JudgeModel(kind="reward", pairs=8), 0)
    assert len(pairs) == 8
    margins, asked = margins_of(program(), pairs, params)
    assert len(asked) == 2 * 2 * 8
    found = by_principles(pairs, margins, params, 0)
    assert len(found) == 6 * 8
    for one in found:
        numbers = [float(candidate.name[1:]) for candidate in one.question.candidates]
        higher = one.question.rubric.principles[0] in ("more a", "less b")
        assert one.prefers_first == ((numbers[0] > numbers[1]) == higher)
    assert found == by_principles(pairs, margins, params, 0)
    assert found != by_principles(pairs, margins, params, 1)


def test_an_answer_in_another_language_loses() -> None:
    """Whatever the judge prefers; and where both stray, there is no preference."""
    pytest.importorskip("py3langid")
    texts = ["The capital is Paris, of course.", "Die Hauptstadt ist natürlich Paris.", "La capitale est Paris, bien sûr."]
    answers = {"t": [Candidate(text, name=f"e{number}") for number, text in enumerate(texts)]}
    params = sampling("a", negate=0.0, label_noise=0.0, rule_label_noise=0.0, languages=True)
    pairs = pairs_of({"t": "Name the capital of France, please."}, answers, JudgeModel(kind="reward"), 0)
    margins, _ = margins_of(program(), pairs, params)
    found = by_principles(pairs, margins, params, 0)
    assert len(found) == 4 * 2, "the pair of two other languages is left out"
    for one in found:
        first, second = one.question.candidates
        assert one.ruled
        assert one.prefers_first == (first.name == "e0")
    assert {first.name, second.name} >= {"e0"}
    assert language_rule("Name the capital of France, please.", "Paris", "Lyon") == (False, None), "a name has no language"


def test_a_strong_position_bias_leaves_pairs_undecided() -> None:
    pairs = pairs_of({"t": "task"}, ANSWERS, JudgeModel(kind="reward", pairs=10), 0)
    counts = [len(by_quality(pairs, margins_of(program(bias), pairs, None)[0])) for bias in (0.0, 1.5, 100.0)]
    assert counts == [10, 6, 0], "of 10 pairs 4 differ by 1, whose margin is 1"


def test_short_answers_and_copies_are_not_compared() -> None:
    answers = {"t": [Candidate("yes"), Candidate("yes", name="copy"), Candidate("an answer"), Candidate("other answer")]}
    assert len(pairs_of({"t": ""}, answers, JudgeModel(kind="reward"), 0)) == 3
    assert len(pairs_of({"t": ""}, answers, JudgeModel(kind="reward", shortest=4), 0)) == 1


def test_server_judges_read_principles() -> None:
    question = Question("pointwise", "t", "task", (Candidate("x"),))
    assert "Principles" not in messages(question)[1]["content"]
    with_principles = Question("pointwise", "t", "task", (Candidate("x"),), Rubric(principles=("be brief",)))
    assert "- be brief" in messages(with_principles)[1]["content"]
    assert with_principles.key != question.key


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PrincipleSampling(items=[principle("a"), principle("a")]), "twice"),
        (lambda: SampledPrinciples(items=[principle("a")], bonus={"b": 1.0}), "no principle"),
        (lambda: SampledPrinciples(per_task=0), "per_task is 0"),
        (lambda: JudgeModel(labels="trees"), "kind other than none"),
        (lambda: JudgeModel(kind="reward", labels="trees", principles=PrincipleSampling()), "labels: program"),
        (lambda: JudgeModel(kind="reward", labels="server"), r"judge_model\.server\.model"),
        (lambda: JudgeModel(kind="reward", labels="policy", program=ProgramFaults(noise=0.0)), "labels: program"),
    ],
)
def test_impossible_settings_are_refused(make, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        make()


def test_a_rule_on_languages_is_refused_without_the_package_that_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r"needs py3langid, which is not installed: pip install 'bellwether\[judging\]'"):
        sampling("a", languages=True)
    assert not sampling("a").languages
