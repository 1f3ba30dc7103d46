"""Rules of verdicts; simulations of their error rates (nominal 5 %) and power."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats

from stages.claims.checks import FEWEST
from stages.claims.inference import Estimate, Sample, compare
from stages.claims.sequential import (
    ALPHA,
    Kind,
    Look,
    adjusted,
    alphas,
    discoveries,
    effect,
    forecast,
    judge,
    sequential_p,
    verdict,
)
from stages.evaluation.statistics import StatisticsError

THREE, FOUR = [8, 12, 20], [8, 12, 20, 32]


@dataclass(frozen=True)
class Rule:
    kind: Kind
    threshold: float = 0.0
    margin: float = 0.05


def estimate(low: float, high: float, narrower: float = 0.005) -> Estimate:
    """The margin interval is the interval less `narrower` at both ends."""
    return Estimate((low + high) / 2, low, high, low + narrower, high - narrower, 0.5, 8, 0)


NONE = Sample(np.zeros(1), seedless=True)
ALTERNATING = np.array([1.0, -1.0] * 16)
"""Scatter of 32 seeds around 0 whose first 8, 12 and 20 have mean 0, too."""


# Rules


def test_level_is_split_over_the_looks() -> None:
    assert alphas(THREE) == pytest.approx([0.01, 0.015, 0.025])
    assert alphas(FOUR) == pytest.approx([0.05 / 9, 0.075 / 9, 0.125 / 9, 0.2 / 9])
    assert alphas([8]) == [ALPHA]
    for looks in ([], [8, 8], [12, 8], [1, 8], [8, 9, 10, 11, 12]):
        with pytest.raises(StatisticsError, match="growing numbers of seeds"):
            alphas(looks)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.001, 0.2, "better"),
        (0.0, 0.2, "undecided"),
        (-0.2, -0.001, "worse"),
        (-0.054, 0.054, "equivalent"),  # the margin interval is within +-0.049
        (-0.055, 0.054, "undecided"),
        (0.001, 0.02, "better"),  # significant, however small
        (0.02, 0.02, "undecided"),  # degenerate
        (0.0, 0.0, "undecided"),
    ],
)
def test_effect_of_an_interval(low: float, high: float, expected: str) -> None:
    found = estimate(low, high, 0.0 if low == high else 0.005)
    assert effect(found, 0.05) == expected
    by_effect = {"better": "reproduced", "undecided": "undecided"}
    assert verdict("superiority", 0.0, 0.05, found) == by_effect.get(expected, "not reproduced")


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("superiority", 0.001, 0.041, "reproduced"),  # difference 0.021, threshold 0.02
        ("superiority", 0.001, 0.035, "not reproduced"),  # better, by 0.018
        ("superiority", -0.01, 0.2, "undecided"),
        ("non_inferiority", -0.054, 0.2, "reproduced"),
        ("non_inferiority", -0.056, 0.2, "undecided"),
        ("non_inferiority", -0.2, -0.051, "not reproduced"),
        ("non_inferiority", -0.2, -0.01, "undecided"),  # worse, but perhaps by less than the margin
        ("non_inferiority", -0.04, -0.01, "reproduced"),  # worse, by less than the margin
        ("equivalence", -0.054, 0.054, "reproduced"),
        ("equivalence", 0.01, 0.04, "reproduced"),  # better, by less than the margin
        ("equivalence", 0.01, 0.08, "undecided"),
        ("equivalence", 0.051, 0.2, "not reproduced"),
        ("equivalence", -0.2, -0.051, "not reproduced"),
    ],
)
def test_verdict_of_an_interval(kind: Kind, low: float, high: float, expected: str) -> None:
    assert verdict(kind, 0.02, 0.05, estimate(low, high)) == expected


@pytest.mark.parametrize("kind", ["superiority", "non_inferiority", "equivalence"])
def test_degenerate_interval_is_undecided(kind: Kind) -> None:
    """Contract: an interval of width 0 gives no verdict of any kind, so all looks are taken."""
    for value in (-0.2, 0.0, 0.02, 0.2):
        looks = judge(THREE, Sample(np.full(20, value)), NONE, Rule(kind))
        assert [(look.seeds, look.effect, look.verdict) for look in looks] == [(n, "undecided", "undecided") for n in THREE]


def test_superiority_at_the_first_look() -> None:
    """Eight paired differences, in points: 4, 6, 5, 7, 3, 5, 6, 4. Mean 40 / 8 = 5; deviations -1, 1, 0, 2, -2, 0, 1, -1, sum of
    squares 12; standard deviation sqrt(12 / 7) = 1.309307, standard error 1.309307 / sqrt(8) = 0.462910. The first of three looks
    has level 0.05 * 1 / 5 = 0.01: t(7) at 99.5 % is 3.499483, the interval 5 +- 1.619946 = 3.380 to 6.620. Above 0: better. 5 is
    at least 3: reproduced; below 6: not reproduced."""
    a = np.array([54, 62, 58, 66, 51, 60, 61, 55]) / 100
    b = np.array([50, 56, 53, 59, 48, 55, 55, 51]) / 100
    (look,) = judge(THREE, Sample(a), Sample(b), Rule("superiority", 0.03))
    assert (look.seeds, look.alpha, look.effect, look.verdict) == (8, pytest.approx(0.01), "better", "reproduced")
    assert (look.estimate.low, look.estimate.high) == pytest.approx((0.03380054, 0.06619946), abs=1e-7)
    assert judge(THREE, Sample(a), Sample(b), Rule("superiority", 0.06))[-1].verdict == "not reproduced"


def test_equivalence_at_the_second_look() -> None:
    """Differences alternate between +6 and -6 points. Eight seeds: sum of squares 8 * 36 = 288, standard deviation sqrt(288 / 7)
    = 6.414270, standard error 2.267787; t(7) at 1 - 0.01 is 2.997952: margin interval +-6.799, beyond 5: undecided. Twelve:
    sqrt(432 / 11) = 6.266796, standard error 1.809068; t(11) at 1 - 0.015 is 2.490664: +-4.505782, within 5; t(11) at 1 - 0.0075
    is about 2.879: +-5.21, around 0: equivalent, so a claim of superiority is not reproduced."""
    first, second = judge(THREE, Sample(0.06 * ALTERNATING), NONE, Rule("superiority"))
    assert (first.seeds, first.effect, first.verdict) == (8, "undecided", "undecided")
    assert first.estimate.margin_high == pytest.approx(0.067987, abs=1e-6)
    assert (second.seeds, second.effect, second.verdict) == (12, "equivalent", "not reproduced")
    assert second.estimate.margin_high == pytest.approx(0.045058, abs=1e-6)
    assert second.estimate.high == pytest.approx(0.0521, abs=1e-4)


def test_decided_look_stays_decided() -> None:
    """Contract: later seeds, here of an arm that becomes worse, do not reopen a claim."""
    values = np.concatenate([0.1 + 0.01 * ALTERNATING[:8], -0.5 + 0.01 * ALTERNATING[:12]])
    looks = judge(THREE, Sample(values), NONE, Rule("superiority"))
    assert [(look.seeds, look.verdict) for look in looks] == [(8, "reproduced")]


def test_looks_are_taken_only_with_finished_seeds() -> None:
    wide = Sample(0.3 * ALTERNATING)
    for done, taken in ((7, []), (8, [8]), (11, [8]), (12, [8, 12]), (32, [8, 12, 20])):
        assert [look.seeds for look in judge(THREE, wide.first(done), NONE, Rule("superiority"))] == taken
    assert [look.seeds for look in judge(FOUR, wide, wide.first(12), Rule("superiority"))] == [8, 12]
    early, late = (judge(FOUR, wide.first(done), NONE, Rule("superiority"))[0] for done in (8, 32))
    assert early == late


def test_arms_without_seeds_have_one_look() -> None:
    """Contract: there is no further data to wait for, so the whole level is spent at once."""
    a = Sample(np.linspace(0.2, 0.5, 30)[None], np.ones(30), seedless=True)
    b = Sample(np.linspace(0.2, 0.5, 30)[None, ::-1] - 0.2, np.ones(30), seedless=True)
    (look,) = judge(FOUR, a, b, Rule("superiority"))
    assert (look.seeds, look.alpha, look.verdict) == (0, ALPHA, "reproduced")
    assert look.estimate == compare(a, b, ALPHA)
    assert judge(FOUR, NONE, NONE, Rule("superiority")) == []


def test_sequential_p() -> None:
    """0.004 * 0.05 / 0.01 = 0.02; 0.03 * 0.05 / 0.015 = 0.1; the smaller is 0.02. A p of 0.5 at the first look gives 2.5, capped
    at 1."""
    assert sequential_p([0.004], [0.01]) == pytest.approx(0.02)
    assert sequential_p([0.03, 0.004], [0.01, 0.015]) == pytest.approx(0.004 * 0.05 / 0.015)
    assert sequential_p([0.5], [0.01]) == 1.0
    with pytest.raises(StatisticsError, match="at least one"):
        sequential_p([], [])
    with pytest.raises(StatisticsError, match="2 and 1"):
        sequential_p([0.1, 0.2], [0.01])


def test_benjamini_hochberg_adjustment() -> None:
    """Sorted 0.001, 0.012, 0.03, 0.039, 0.6 times 5 / rank: 0.005, 0.03, 0.05, 0.04875, 0.6; each replaced by the smallest from
    there on."""
    ps = [0.6, 0.001, 0.039, 0.012, 0.03]
    assert adjusted(ps) == pytest.approx([0.6, 0.005, 0.04875, 0.03, 0.04875])
    assert discoveries(ps) == [False, True, True, True, True]
    assert discoveries(ps, q=0.04) == [False, True, False, True, False]
    assert discoveries([]) == []


# Simulations: panels of 100 tasks in 40 clusters, 2 attempts each

TRIALS = 800
SIZES = np.repeat([1, 2, 3, 4], 10)
DIFFICULTY = np.linspace(-19, 19, 40)[np.random.default_rng(0).permutation(40)]
Runs = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Success, in per cent, of runs of one arm."""


def normal(sd: float) -> Runs:
    """sd: of the difference of two runs. Attempts add sqrt(2 * 0.175 / 200), 4.2 points."""
    return lambda rng, shape: rng.normal(75, sd / math.sqrt(2), shape)


def bistable(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.5, 45.0, 81.0)


def between(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Every run at the mean of `bistable`."""
    return np.full(shape, 63.0)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Most runs near 80 %, some far below."""
    return 80.0 - np.minimum(rng.exponential(8.0, shape), 60.0)


def panels(rng: np.random.Generator, trials: int, seeds: int, runs: Runs, gain: float, by_cluster: float) -> np.ndarray:
    """Success [trials, seeds, 40 clusters]. by_cluster: standard deviation of the arm's gain over clusters, in points."""
    chance = runs(rng, (trials, seeds, 1)) + gain + DIFFICULTY + by_cluster * rng.normal(size=(trials, 1, 40))
    return rng.binomial(2 * SIZES, np.clip(chance / 100, 0, 1)) / (2 * SIZES)


def ends(looks: list[int], a: Runs, b: Runs, gain: float = 0.0, by_cluster: float = 0.0, trials: int = TRIALS) -> list[Look]:
    """The last look of each simulated comparison."""
    rng = np.random.default_rng(1)
    first, second = panels(rng, trials, looks[-1], a, gain, by_cluster), panels(rng, trials, looks[-1], b, 0.0, 0.0)
    rule = Rule("superiority")
    return [judge(looks, Sample(x, SIZES), Sample(y, SIZES), rule)[-1] for x, y in zip(first, second, strict=True)]


def share(looks: list[Look], *effects: str) -> float:
    return sum(look.effect in effects for look in looks) / len(looks)


def at_most(nominal: float, trials: int) -> float:
    """The share that events of probability `nominal` exceed in one of 1,000 simulations."""
    return float(scipy.stats.binom.isf(1e-3, trials, nominal)) / trials


NO_EFFECT = {
    "SD 4.4": (normal(1.4), normal(1.4), 0.0),
    "SD 7.7": (normal(6.5), normal(6.5), 0.0),
    "bistable": (bistable, bistable, 0.0),
    "bistable around a steady arm": (bistable, between, 0.0),
    "skewed": (skewed, skewed, 0.0),
    "gains and losses by cluster": (normal(1.4), normal(1.4), 10.0),
}


@pytest.mark.parametrize("name", NO_EFFECT)
@pytest.mark.parametrize("looks", [THREE, FOUR], ids=["20 seeds", "32 seeds"])
def test_false_verdicts_are_at_most_the_nominal_share(name: str, looks: list[int]) -> None:
    """Contract: arms without a difference are found better or worse in at most 5 % of comparisons, over all looks; 7.5 % of 800
    comparisons are exceeded with a probability of 0.1 % if it is 5 %."""
    a, b, by_cluster = NO_EFFECT[name]
    assert share(ends(looks, a, b, by_cluster=by_cluster), "better", "worse") <= at_most(ALPHA, TRIALS)


def test_false_verdicts_without_panels_from_the_fewest_seeds_on() -> None:
    """Contract: metrics without a value per task, whose runs scatter by hardly more than their two outcomes, too, from the
    smallest first look on that experiments may have."""
    rng = np.random.default_rng(1)
    runs = bistable(rng, (2, TRIALS, 12)) + rng.normal(0.0, 1.2, (2, TRIALS, 12))
    looks = [judge([FEWEST, 8, 12], Sample(a), Sample(b), Rule("superiority"))[-1] for a, b in zip(*runs, strict=True)]
    assert share(looks, "better", "worse") <= at_most(ALPHA, TRIALS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_EFFECT)
@pytest.mark.parametrize("looks", [THREE, FOUR], ids=["20 seeds", "32 seeds"])
def test_false_verdicts_in_many_comparisons(name: str, looks: list[int]) -> None:
    """As above with 3,000 comparisons: at most 6.3 %."""
    a, b, by_cluster = NO_EFFECT[name]
    assert share(ends(looks, a, b, by_cluster=by_cluster, trials=3000), "better", "worse") <= at_most(ALPHA, 3000)


@pytest.mark.parametrize("gain", [-5.0, 5.0])
def test_difference_at_the_margin_is_rarely_equivalent(gain: float) -> None:
    assert share(ends(THREE, normal(1.4), normal(1.4), gain), "equivalent") <= at_most(ALPHA, TRIALS)


def test_power_over_panels() -> None:
    """Paired differences of 4.4 points standard deviation, attempts included, with up to 20 seeds."""
    none, better = ends(THREE, normal(1.4), normal(1.4)), ends(THREE, normal(1.4), normal(1.4), 5.0)
    assert share(none, "equivalent") > 0.95
    assert share(better, "better") > 0.95
    assert share(better, "worse") == 0.0
    assert np.mean([look.seeds for look in none + better]) < 13


@pytest.mark.parametrize(
    ("sd", "looks", "difference", "power", "seeds"),
    [(4.4, THREE, 0.0, 0.97, 11.9), (4.4, THREE, 5.0, 0.98, 11.2), (7.7, FOUR, 0.0, 0.87, 26.1), (7.7, FOUR, 5.0, 0.89, 22.2)],
)
def test_forecast_of_seeds_and_power(sd: float, looks: list[int], difference: float, power: float, seeds: float) -> None:
    """Numbers from 20,000 comparisons, tolerance for 1,000."""
    found = forecast(sd, 5.0, looks, difference, simulations=1000)
    assert (found.better if difference else found.equivalent) == pytest.approx(power, abs=0.03)
    assert found.seeds == pytest.approx(seeds, abs=0.7)
    assert found.better + found.worse + found.equivalent + found.undecided == pytest.approx(1.0)
    assert found == forecast(sd, 5.0, looks, difference, simulations=1000)


def test_conclusions_agree_with_adastop() -> None:
    """AdaStop (Mathieu et al., "AdaStop: adaptive statistical testing for sound comparisons of deep RL agents", 2023) permutes
    blocks of 5 runs between the arms and looks after each block up to 20. It concludes the same where effects are clear."""
    adastop = pytest.importorskip("adastop", reason="needs the extra `dev`: pip install -e '.[dev]'")
    rng = np.random.default_rng(2)
    conclusions = {"better": "larger", "worse": "smaller", "equivalent": "equal", "undecided": "equal"}
    for gain in (0.0, 8.0, -8.0, 0.0, 12.0, -12.0):
        a, b = rng.normal(60 + gain, 3.1, 20), rng.normal(60, 3.1, 20)
        theirs = adastop.MultipleAgentsComparator(n=5, K=4, B=500, alpha=ALPHA, seed=0)
        while not theirs.is_finished:
            theirs.partial_compare({"a": a, "b": b}, verbose=False)
        ours = judge(THREE, Sample(a), Sample(b), Rule("superiority", margin=5.0))[-1]
        assert conclusions[ours.effect] == theirs.decisions["[0 1]"], gain
