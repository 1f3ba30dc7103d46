"""Rewards of whole groups: tournaments side by side, repeated calls, failures, and the simulation of the paper's claim."""

from __future__ import annotations

import statistics
from random import Random

import pytest
from scipy.stats import norm

from stages.judging.contract import Candidate, Judgment, Question, Rubric, Status
from stages.judging.gap import GapMonitor, group_agreement
from stages.judging.groups import Group, Scoring, score_groups
from stages.judging.measures import rank_correlation
from stages.judging.program import ProgramJudge
from stages.judging.settings import ProgramFaults
from stages.judging.tournaments import Rules


def groups(count: int, size: int, seed: int = 0) -> tuple[list[Group], dict[str, float]]:
    """Groups of candidates with qualities of N(0, 1)."""
    rng, made, qualities = Random(seed), [], {}
    for number in range(count):
        names = [f"{number}-{entrant}" for entrant in range(size)]
        qualities |= {name: rng.gauss(0, 1) for name in names}
        made.append(Group(f"task {number}", "prompt", tuple(Candidate(f"text {name}", name=name) for name in names)))
    return made, qualities


def program(qualities: dict[str, float], **faults) -> ProgramJudge:
    return ProgramJudge(ProgramFaults(**faults), lambda question, one: qualities[one.name], 0)


def correlation(scoring: Scoring, count: int = 150, size: int = 8, **faults) -> tuple[float, float]:
    """Mean correlation of rewards with the quality over groups, and judge calls per group."""
    made, qualities = groups(count, size)
    scored, asked = score_groups(program(qualities, **faults), made, scoring, 0)
    found = []
    for one, group in zip(scored, made, strict=True):
        truth = [qualities[each.name] for each in group.candidates]
        found.append(statistics.correlation(one.rewards, truth) if len(set(one.rewards)) > 1 else 0.0)
    return statistics.mean(found), len(asked) / count


@pytest.mark.parametrize(
    ("scoring", "expected", "calls"),
    [
        (Scoring("anchor", reward="score"), 0.82, 14),
        (Scoring("unseeded_single_elimination"), 0.71, 14),
        (Scoring("seeded_single_elimination"), 0.85, 28),
        (Scoring("round_robin"), 0.93, 56),
    ],
)
def test_simulated_judge_ranks_as_in_the_worked_example(scoring: Scoring, expected: float, calls: int) -> None:
    """q of N(0, 1), slot scores 6 +/- 0.5 (q_a - q_b) + N(0, 0.5), groups of 8."""
    found, asked = correlation(scoring)
    assert found == pytest.approx(expected, abs=0.04)
    assert asked == calls


def test_compressed_absolute_scores_lose_and_sensitive_ones_do_not() -> None:
    """At equal calls the difference is the judge's sensitivity: with equal gains pointwise scores reach the bracket."""
    bracket, calls = correlation(Scoring("seeded_single_elimination"))
    compressed, same = correlation(Scoring("pointwise", calls=32), step=1.0)
    sensitive, _ = correlation(Scoring("pointwise", calls=32), pointwise_gain=0.5, step=1.0)
    assert (calls, same) == (28, 32)
    assert compressed == pytest.approx(0.63, abs=0.07)
    assert sensitive == pytest.approx(bracket, abs=0.07)
    assert correlation(Scoring("pointwise"), step=1.0)[0] == pytest.approx(0.38, abs=0.08)


def test_position_bias_costs_one_order_more_than_two() -> None:
    swapped, _ = correlation(Scoring("seeded_single_elimination"), position=1.0)
    single, calls = correlation(Scoring("seeded_single_elimination", swap=False), position=1.0)
    assert calls == 14
    assert swapped - single > 0.05


def test_groups_do_not_depend_on_their_neighbours() -> None:
    made, qualities = groups(5, 6)
    for scheme in ("swiss", "double_elimination", "pointwise"):
        together, _ = score_groups(program(qualities), made, Scoring(scheme), 0)
        alone = [score_groups(program(qualities), [group], Scoring(scheme), 0)[0][0] for group in made]
        assert [one.rewards for one in together] == [one.rewards for one in alone]


def test_bradley_terry_rewards_follow_all_matches_and_are_0_for_ties() -> None:
    made, qualities = groups(20, 6)
    scored, _ = score_groups(program(qualities, noise=0.0), made, Scoring("round_robin", reward="bradley_terry"), 0)
    for one, group in zip(scored, made, strict=True):
        assert sum(one.rewards) == pytest.approx(0, abs=1e-6)
        assert rank_correlation(one.rewards, [qualities[each.name] for each in group.candidates]) == pytest.approx(1.0)
    equal = dict.fromkeys(qualities, 0.0)
    for scheme in ("seeded_single_elimination", "round_robin", "swiss"):
        scored, _ = score_groups(program(equal, noise=0.0), made, Scoring(scheme, reward="bradley_terry"), 0)
        assert {reward for one in scored for reward in one.rewards} == {0.0}


def test_repeated_calls_are_averaged() -> None:
    made, qualities = groups(1, 2)
    once, few = score_groups(program(qualities), made, Scoring("anchor", reward="score"), 0)
    often, many = score_groups(program(qualities), made, Scoring("anchor", reward="score", calls=400), 0)
    assert (len(few), len(many)) == (2, 400)
    gap = 0.5 * (qualities["0-0"] - qualities["0-1"])
    assert often[0].rewards[0] - often[0].rewards[1] == pytest.approx(2 * gap, abs=0.15)
    assert once[0].rewards != often[0].rewards
    with pytest.raises(ValueError, match="calls_per_group is 1"):
        score_groups(program(qualities), made, Scoring("anchor", calls=1), 0)


def test_thurstone_strengths_have_errors_and_are_0_for_ties() -> None:
    """One match between two, won: t = -t' with phi(2 t) / Phi(2 t) = ridge t at the maximum."""
    made, qualities = groups(1, 2)
    judge = program(qualities, noise=0.0)
    scored, _ = score_groups(judge, made, Scoring("round_robin", reward="thurstone", ridge=1.0), 0)
    strength = abs(scored[0].rewards[0])
    assert sum(scored[0].rewards) == pytest.approx(0)
    assert norm.pdf(2 * strength) / norm.cdf(2 * strength) == pytest.approx(strength, abs=1e-6)
    assert (scored[0].rewards[0] > 0) == (qualities["0-0"] > qualities["0-1"])
    assert len(scored[0].errors) == 2
    assert all(0 < error < 1 for error in scored[0].errors), "less than the prior's, which has standard deviation 1"
    equal = program(dict.fromkeys(qualities, 0.0), noise=0.0)
    assert score_groups(equal, made, Scoring("round_robin", reward="thurstone"), 0)[0][0].rewards == (0.0, 0.0)
    assert score_groups(judge, made, Scoring("round_robin"), 0)[0][0].errors == ()


class Refusing:
    name = version = "refusing"
    sent = 0

    def keep(self) -> None: ...

    def judge(self, questions):
        return [Judgment(status=Status.REFUSAL) for _ in questions]

    def close(self) -> None: ...


@pytest.mark.parametrize(
    "scheme", ["pointwise", "anchor", "seeded_single_elimination", "swiss", "round_robin", "double_elimination"]
)
@pytest.mark.parametrize("on_failure", ["tie", "drop_match"])
def test_judge_that_never_answers_makes_all_equal(scheme: str, on_failure) -> None:
    made, _ = groups(2, 6)
    scored, asked = score_groups(Refusing(), made, Scoring(scheme, Rules("split_rank"), on_failure=on_failure), 0)
    for one in scored:
        assert len(set(one.rewards)) == 1
    assert all(judgment.status is Status.REFUSAL for _, judgment in asked)


class Partly(Refusing):
    """Fails on questions with candidate `failing`; elsewhere perceives qualities exactly."""

    def __init__(self, qualities: dict[str, float], *failing: str) -> None:
        self.judged, self.failing = program(qualities, noise=0.0), set(failing)

    def judge(self, questions):
        return [
            Judgment(status=Status.TIMEOUT) if {one.name for one in question.candidates} & self.failing else made
            for question, made in zip(questions, self.judged.judge(questions), strict=True)
        ]


def named_group(*names: str) -> list[Group]:
    return [Group("task", "", tuple(Candidate(f"text {name}", name=name) for name in names))]


def test_a_dropped_match_counts_for_nothing() -> None:
    """a > b > c, d failed: as if d had not played; half a win each would put d beside b, and a loss each last."""
    qualities = {"a": 3.0, "b": 2.0, "c": 1.0, "d": 9.0}
    judge = Partly(qualities, "d")
    (ranked,), _ = score_groups(judge, named_group(*"abcd"), Scoring("round_robin", on_failure="drop_match"), 0)
    # Shares of wins (1, 1/2, 0, none: 1/2), so ranks (1, 2, 4, 2).
    assert ranked.rewards == pytest.approx((1.0, 2 / 3, 0.0, 2 / 3))
    scoring = Scoring("round_robin", reward="bradley_terry", on_failure="drop_match")
    (strong,), _ = score_groups(judge, named_group(*"abcd"), scoring, 0)
    (without,), _ = score_groups(judge, named_group(*"abc"), scoring, 0)
    assert strong.rewards == pytest.approx((*without.rewards, 0.0))
    (tied,), _ = score_groups(judge, named_group(*"abcd"), Scoring("round_robin", reward="bradley_terry"), 0)
    assert tied.rewards != pytest.approx(strong.rewards), "a tie is half a win"


def test_a_dropped_score_is_the_mean_of_the_others() -> None:
    judge = Partly({"a": 4.0, "b": 0.0, "c": 9.0}, "c")
    (dropped,), _ = score_groups(judge, named_group(*"abc"), Scoring("pointwise", on_failure="drop_match"), 0)
    assert dropped.rewards == pytest.approx((8.0, 7.0, 7.5)), "7 + 0.25 q"
    (tied,), _ = score_groups(judge, named_group(*"abc"), Scoring("pointwise"), 0)
    assert tied.rewards == pytest.approx((8.0, 7.0, 5.0))


def test_a_group_may_have_its_own_checklist() -> None:
    def met(question: Question, one: Candidate) -> list[bool]:
        return [item in one.answer for item in question.rubric.items]

    judge = ProgramJudge(ProgramFaults(), lambda question, one: 0.0, 0, met)
    group = Group("task", "", (Candidate("short and polite", name="a"), Candidate("short", name="b")), items=("short", "polite"))
    (scored,), asked = score_groups(judge, [group], Scoring("checklist"), 0)
    assert scored.rewards == (1.0, 0.5)
    assert {question.rubric.items for question, _ in asked} == {("short", "polite")}
    faulty = ProgramJudge(ProgramFaults(flip=1.0), lambda question, one: 0.0, 0, met)
    assert score_groups(faulty, [group], Scoring("checklist"), 0)[0][0].rewards == (0.0, 0.5)


def test_process_criteria_need_steps() -> None:
    seen: list[Question] = []

    class Watching(Refusing):
        def judge(self, questions):
            seen.extend(questions)
            return super().judge(questions)

    rubric = Rubric(process=("detail",), process_weight=0.6)
    for steps in ((), ("look",)):
        group = Group("task", "", tuple(Candidate("text", steps, name) for name in "ab"))
        score_groups(Watching(), [group], Scoring("anchor", rubric=rubric), 0)
    assert [question.rubric.process_weight for question in seen] == [0.0, 0.0, 0.6, 0.6]


def test_group_of_one_is_refused() -> None:
    made, qualities = groups(1, 1)
    with pytest.raises(ValueError, match="group_size"):
        score_groups(program(qualities), made, Scoring("anchor"), 0)
    assert score_groups(program(qualities), made, Scoring("pointwise"), 0)[0][0].rewards


def test_gap_widens_when_the_judge_is_fooled() -> None:
    monitor = GapMonitor(warn=1.0, stop=2.0)
    assert monitor.observe([1.0, 3.0], [0.0, 2.0]) == {"judge_score": 2.0, "judge_gold": 1.0, "judge_gap": 0.0}
    for step in range(1, 8):
        gap = monitor.observe([2.0 + step / 2], [1.0 - step / 2])["judge_gap"]
        assert gap == pytest.approx(step)
        resumed = GapMonitor(1.0, 2.0)
        resumed.load_state_dict(monitor.state_dict())
        assert resumed.stops == monitor.stops
        assert monitor.stops == (step >= 5), "the mean of five steps exceeds 2"
        assert (monitor.ending("rl.judge") is not None) == monitor.stops
    assert monitor.warned_at == 5, "steps 0 to 4 have the mean 2"
    assert "the training ends at step 8" in str(monitor.ending("rl.judge"))
    assert "5.00 standard deviations apart, more than rl.judge.stop_gap 2.0" in str(monitor.ending("rl.judge"))


def test_honest_learning_opens_no_gap() -> None:
    monitor = GapMonitor(warn=0.5, stop=None)
    for step in range(10):
        monitor.observe([step, step + 2.0], [step / 2, step / 2 + 1.0])
    assert monitor.warned_at is None
    assert monitor.gaps == pytest.approx([0.0] * 10)


def test_group_agreement() -> None:
    assert group_agreement([[1, 2, 3], [1, 1, 1]], [[1, 2, 3], [1, 2, 3]]) == pytest.approx(1.0)
    assert group_agreement([[1, 1]], [[1, 2]]) is None
