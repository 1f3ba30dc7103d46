"""Utilities by forced choices: the Thurstone model, which pairs are asked, and coherence, against numbers by hand."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from random import Random

import pytest
import torch
from pydantic import ValidationError
from scipy.stats import spearmanr

from stages.judging.active_pairs import all_pairs, budget, first_pairs, held_out, next_pairs, random_pairs
from stages.judging.thurstone import Fitted, choice_probability, fit, standardised
from stages.judging.utilities import Elicited, agreement, cycle, elicit, measured, order_consistency, triads
from stages.judging.utility_settings import Control, Utilities

NAMES = [f"outcome {number:02d}" for number in range(12)]
FAST = {"epochs": 120, "learning_rate": 0.05, "triads": 60, "lotteries": 0}


def params(count: int = 12, **keys) -> Utilities:
    return Utilities.model_validate({"outcomes": [f"outcome {number:02d}" for number in range(count)], **FAST, **keys})


def phi(value: float) -> float:
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


def judge(utilities: Sequence[float], noise: float = 0.5, bias: float = 0.0):
    """A simulated model: normal noise on each utility, a probit bias for the first of two."""

    def ask(pairs: Sequence[tuple[str, str]]) -> list[tuple[float, float]]:
        found = []
        for first, second in pairs:
            gap = utilities[int(first[-2:])] - utilities[int(second[-2:])]
            share = phi(gap / (noise * math.sqrt(2)) + bias) if noise else float(gap + bias > 0)
            found.append((share, 1 - share))
        return found

    return ask


def normal(count: int, seed: int = 0) -> list[float]:
    rng = Random(seed)
    return [rng.gauss(0, 1) for _ in range(count)]


@pytest.mark.parametrize(("gap", "variance", "expected"), [(1.0, 0.5, 0.8413), (1.0, 1.0, 0.7602), (0.0, 0.5, 0.5)])
def test_choice_probabilities(gap: float, variance: float, expected: float) -> None:
    assert Fitted((gap, 0.0), (variance, variance)).probability(0, 1) == pytest.approx(expected, abs=1e-4)


def test_equal_variances_chain() -> None:
    """P(a > b) = P(b > c) = 0.8 with equal variances: P(a > c) = Phi(2 * 0.8416) = 0.9538."""
    step = 0.8416
    assert Fitted((2 * step, step, 0.0), (0.5, 0.5, 0.5)).probability(0, 2) == pytest.approx(0.9538, abs=1e-4)


def test_utilities_have_mean_0_and_deviation_1_and_no_scale() -> None:
    m, t = torch.tensor([0.1, 2.0, -1.0, 0.4], dtype=torch.float64), torch.tensor([0.1, -0.2, 0.0, 0.3], dtype=torch.float64)
    mu, variance = standardised(m, t)
    assert float(mu.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(mu.std()) == pytest.approx(1.0, abs=1e-4)
    for scale, shift in ((1.0, 7.0), (1000.0, 0.0)):
        other, wider = standardised(scale * m + shift, t + 2 * math.log(scale))
        first, second = (
            choice_probability(mu[0] - mu[1], variance[0] + variance[1]),
            choice_probability(other[0] - other[1], wider[0] + wider[1]),
        )
        assert float(first) == pytest.approx(float(second), abs=1e-4)


def test_fit_recovers_an_order_and_is_reproducible() -> None:
    truth = normal(8)
    choices = {pair: phi((truth[pair[0]] - truth[pair[1]]) / 0.7) for pair in all_pairs(8)}
    fitted = fit(choices, 8, epochs=400, rate=0.05)
    assert spearmanr(fitted.mu, truth).statistic > 0.99
    assert fitted == fit(dict(reversed(choices.items())), 8, epochs=400, rate=0.05)
    with pytest.raises(ValueError, match="there are none"):
        fit({}, 8)


@pytest.mark.parametrize(("count", "expected"), [(16, 128), (18, 150), (32, 320), (500, 8965)])
def test_budgets(count: int, expected: int) -> None:
    """int(2 n log2 n): 16 outcomes have 120 pairs, fewer than their budget."""
    assert budget(count) == expected


def test_start_is_a_cycle_and_avoids_held_out_pairs() -> None:
    held = held_out(20, 0.3, 0)
    assert len(held) == 57
    start = first_pairs(20, [], 0)
    degrees = [sum(outcome in pair for pair in start) for outcome in range(20)]
    assert degrees == [2] * 20
    other = first_pairs(20, held, 0)
    assert len(set(other)) == 20
    assert not set(other) & set(held)


def test_active_pairs_are_close_and_new_and_a_pure_function() -> None:
    mu, asked, held = normal(20), first_pairs(20, [], 0), [(0, 1)]
    found = next_pairs(mu, asked, held, 5, 10.0, 20.0, 3)
    assert found == next_pairs(mu, asked, held, 5, 10.0, 20.0, 3)
    assert found != next_pairs(mu, asked, held, 5, 10.0, 20.0, 4)
    assert not set(found) & {*asked, *held}
    gaps = sorted(abs(mu[i] - mu[j]) for i, j in all_pairs(20))
    assert all(abs(mu[i] - mu[j]) <= gaps[len(gaps) // 2] for i, j in found)
    assert len(next_pairs(mu, asked, held, 10_000, 10.0, 20.0, 0)) == 190 - 20 - 1
    assert len(random_pairs(asked, held, 20, 5, 0)) == 5


def test_held_out_pairs_are_not_asked_before_the_fit() -> None:
    asked: list[tuple[str, str]] = []

    def ask(pairs: Sequence[tuple[str, str]]) -> list[tuple[float, float]]:
        asked.extend(pairs)
        return judge(normal(12))(pairs)

    found, _, _ = elicit(params(per_round=10, edge_multiplier=0.6), ask, 0)
    held = {frozenset((NAMES[i], NAMES[j])) for i, j in found.held}
    assert not held & {frozenset(pair) for pair in asked}
    assert len(found.choices) == budget(12, 0.6)


def test_cycles_by_hand() -> None:
    """All 0.5: soft 0.25, no strict majority; a sure circle: 1 and True; a sure order: 0 and False."""
    assert cycle(0.5, 0.5, 0.5) == (0.25, False)
    assert cycle(1.0, 1.0, 1.0) == (1.0, True)
    assert cycle(1.0, 1.0, 0.0) == (0.0, False)


def test_a_coherent_judge_and_a_coin() -> None:
    """Utilities N(0, 1) and noise 0.5 in 20 answers: held-out accuracy near 0.96, confidence 0.87, soft cycles 0.04; a coin that
    is flipped 20 times: confidence 0.588, soft cycles 0.25."""
    coherent = measured(params(24, samples=10, holdout=0.2), judge(normal(24, 3)), 0)
    assert coherent["accuracy"] > 0.85
    assert coherent["confidence"] == pytest.approx(0.87, abs=0.06)
    assert coherent["soft_cycles"] < 0.1
    assert not coherent["indifferent"]
    coin = measured(params(24, samples=10, holdout=0.2), lambda pairs: [(0.5, 0.5)] * len(pairs), 0)
    assert coin["confidence"] == pytest.approx(0.588, abs=0.02)
    assert coin["soft_cycles"] == pytest.approx(0.25, abs=0.03)
    exact = measured(params(8), lambda pairs: [(0.5, 0.5)] * len(pairs), 0)
    assert (exact["confidence"], exact["soft_cycles"], exact["hard_cycles"]) == (0.5, 0.25, 0.0)
    assert exact["log_loss"] == pytest.approx(math.log(2), abs=0.1)
    assert exact["indifferent"]


def test_confidence_is_not_that_of_the_close_pairs_that_were_asked() -> None:
    """Of 40 outcomes a third of the pairs is asked, close ones first; confidence is that of all pairs nevertheless."""
    truth = normal(40, 5)
    ask = judge(truth)
    every = [ask([(f"x {i:02d}", f"x {j:02d}")])[0][0] for i, j in all_pairs(40)]
    known = sum(max(share, 1 - share) for share in every) / len(every)
    section = params(40, edge_multiplier=1.2, per_round=60, triads=300)
    found = measured(section, ask, 0)
    assert found["pairs"] == budget(40, 1.2) < len(every) / 2
    asked = [max(share, 1 - share) for _, _, share in found["choices"]]
    assert sum(asked) / len(asked) < known - 0.05
    assert found["confidence"] == pytest.approx(known, abs=0.02)
    biased = measured(section, judge(truth, bias=0.8), 0)
    agree = [abs(truth[i] - truth[j]) / 2**-0.5 > 0.8 for i, j in all_pairs(40)]
    assert biased["order_consistency"] == pytest.approx(sum(agree) / len(agree), abs=0.06)


def test_one_order_takes_a_position_for_a_preference() -> None:
    """A judge that always answers the first option: sure utilities by index in one order, indifference in both."""
    first = lambda pairs: [(1.0, 0.0)] * len(pairs)  # noqa: E731
    single = measured(params(10, both_orders=False), first, 0)
    assert (single["confidence"], single["accuracy"]) == (1.0, 1.0)
    assert not single["indifferent"], "sure choices, all of them alike"
    both = measured(params(10), first, 0)
    assert both["confidence"] == 0.5
    assert both["order_consistency"] == 0.0
    assert both["indifferent"]


def test_order_bias_shrinks_preferences() -> None:
    """True 0.841 with a probit bias of 0.8 is seen as (Phi(1.8) + Phi(0.2)) / 2 = 0.772."""
    found = Elicited(NAMES[:2], params(), judge([math.sqrt(0.5), 0.0], noise=0.5, bias=0.8), 0)
    found.query([(0, 1)])
    assert found.choices[0, 1] == pytest.approx(0.772, abs=1e-3)
    assert order_consistency(found, [(0, 1)]) == 1.0


@pytest.mark.parametrize(("rule", "expected"), [("half", 0.7), ("skip", 5 / 6), ("random", 0.7)])
def test_answers_that_are_neither(rule: str, expected: float) -> None:
    """0.5 first, 0.1 second, 0.4 neither, in both orders alike (turned)."""

    def ask(pairs: Sequence[tuple[str, str]]) -> list[tuple[float, float]]:
        return [(0.5, 0.1) if first < second else (0.1, 0.5) for first, second in pairs]

    found = Elicited(NAMES[:2], params(unparseable=rule), ask, 0)
    found.query([(0, 1)])
    assert found.choices[0, 1] == pytest.approx(expected)


def test_a_pair_without_readable_answers_is_dropped() -> None:
    found = Elicited(NAMES[:2], params(unparseable="skip"), lambda pairs: [(0.0, 0.0)] * len(pairs), 0)
    found.query([(0, 1)])
    assert found.choices == {}


def test_a_model_that_answers_with_neither_option_is_named() -> None:
    with pytest.raises(ValueError, match=r"no answer was one of the options A, B, and unparseable is skip.*set samples to 0"):
        measured(params(unparseable="skip", samples=10), lambda pairs: [(0.0, 0.0)] * len(pairs), 0)


def test_triads_of_many_outcomes_are_not_listed() -> None:
    """Contract: the paper's 500 outcomes have 20 million triads; a thousand are drawn without them, each once."""
    found = Elicited([str(number) for number in range(200)], params(triads=1000), judge([]), 0)
    tracemalloc.start()
    drawn = triads(found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6
    assert len(set(drawn)) == len(drawn) == 1000
    assert all(one < two < three for (one, two), (_, three), _ in drawn)
    assert drawn == triads(found)


def test_lotteries_of_an_expected_utility_maximiser() -> None:
    found = agreement([1.0, 2.0, 4.0], [10.0, 20.0, 40.0])
    assert found["lottery_r"] == pytest.approx(1.0)
    assert found["lottery_error"] == pytest.approx(0.0)
    assert found["lottery_order"] == 1.0
    assert agreement([1.0, 2.0], [2.0, 1.0])["lottery_order"] == 0.0


def test_active_pairs_beat_random_ones_at_a_small_budget() -> None:
    """Mean rank correlation with the truth over a few draws."""
    means = []
    for active in (True, False):
        found = []
        for seed in range(2):
            truth = normal(24, 10 + seed)
            section = params(24, active=active, edge_multiplier=0.5, per_round=12, pseudo=None)
            found.append(spearmanr(elicit(section, judge(truth, 0.2), seed)[1].mu, truth).statistic)
        means.append(sum(found) / len(found))
    assert means[0] > means[1] - 0.05


def test_equal_variances_and_logistic_noise_are_bradley_terry() -> None:
    """P = 1 / (1 + exp(mu_j - mu_i)): a normal with deviation 1.702 is within 0.01 of the logistic, so that choices by the one
    are fitted with the order and the probabilities of the other."""
    strengths = [-1.5, -0.5, 0.0, 0.7, 1.6]
    choices = {(i, j): 1 / (1 + math.exp(strengths[j] - strengths[i])) for i, j in all_pairs(5)}
    for gap in (0.1, 0.5, 1.0, 2.0, 3.0):
        thurstone = Fitted((gap / 1.702, 0.0), (0.5, 0.5)).probability(0, 1)
        assert thurstone == pytest.approx(1 / (1 + math.exp(-gap)), abs=0.01)
    fitted = fit(choices, 5, epochs=800, rate=0.05)
    assert list(fitted.mu) == sorted(fitted.mu)
    for pair, share in choices.items():
        assert fitted.probability(*pair) == pytest.approx(share, abs=0.02)


def test_sure_choices_of_a_total_order_are_sorted() -> None:
    order = [3, 0, 4, 1, 5, 2]
    choices = {(i, j): float(order.index(i) > order.index(j)) for i, j in all_pairs(6)}
    fitted = fit(choices, 6, epochs=400, rate=0.05, prior=0.001)
    assert sorted(range(6), key=fitted.mu.__getitem__) == order
    assert all((fitted.probability(*pair) > 0.5) == (share == 1.0) for pair, share in choices.items())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Utilities(outcomes=["a", "b", "c"]), "at least 4"),
        (lambda: Utilities(outcomes=["a", "b", "c", "a"]), "twice"),
        (lambda: Control(questions=3), "control.kind is none"),
        (lambda: Control(kind="soft"), "at least four outcomes"),
        (lambda: Control(kind="soft", outcomes=dict(zip("abcd", range(4), strict=True)), valid_share=1.0), "less than 0.9"),
        (lambda: Control(kind="soft", outcomes=dict(zip("abcd", range(4), strict=True)), valid_share=0.0), "greater than 0"),
    ],
)
def test_impossible_settings_are_refused(make, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        make()
