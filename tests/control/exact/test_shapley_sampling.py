"""Sampled Shapley and Banzhaf values against exact ones, the paper's worked examples and shapiq."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

from stages.control.exact.shapley import CoalitionError, shapley
from stages.control.exact.shapley_sampling import Estimate, banzhaf, by_coalitions, by_permutations

GLOVES = np.array([float(bool(coalition & 0b011) and bool(coalition & 0b100)) for coalition in range(8)])
"""Two left gloves (players 0 and 1), one right glove."""
UNANIMITY = np.array([0.0] * 7 + [1.0])
Sampler = Callable[..., Estimate]


def game(table: np.ndarray) -> Callable[[int, int], float]:
    return lambda coalition, sample: float(table[coalition])


def additive(shares: np.ndarray) -> np.ndarray:
    return np.array([sum(share for player, share in enumerate(shares) if c >> player & 1) for c in range(1 << len(shares))])


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([0.0, 10.0, 20.0, 50.0], [20.0, 30.0]),
        ([-5.0, 10.0, 20.0, 50.0], [22.5, 32.5]),
        (UNANIMITY, [0.25] * 3),
        (GLOVES, [0.25, 0.25, 0.75]),
    ],
)
def test_banzhaf_values(table: list[float], expected: list[float]) -> None:
    assert banzhaf(np.array(table)) == pytest.approx(np.array(expected))


def test_each_sampler_approaches_its_own_value() -> None:
    """Gloves: Shapley (1/6, 1/6, 2/3); the coalitions of the paper's code approach Banzhaf (1/4, 1/4, 3/4) instead."""
    by_order = by_permutations(game(GLOVES), 3, 4000, ("gloves",))
    uniform = by_coalitions(game(GLOVES), 3, 4000, ("gloves",))
    assert np.abs(by_order.values - shapley(GLOVES)).max() < 4 * by_order.errors.max() < 0.04
    assert by_order.values == pytest.approx([1 / 6, 1 / 6, 2 / 3], abs=0.03)
    assert uniform.values == pytest.approx(banzhaf(GLOVES), abs=0.03)
    assert np.isnan(uniform.gap)


@pytest.mark.parametrize("sampler", [by_permutations, by_coalitions])
@pytest.mark.parametrize("samples", [1, 7])
def test_additive_games_have_no_variance(sampler: Sampler, samples: int) -> None:
    shares = np.array([3.0, -1.0, 0.0, 2.5])
    found = sampler(game(additive(shares)), 4, samples, ("additive",))
    assert found.samples == pytest.approx(np.tile(shares, (samples, 1)))
    assert found.values[2] == 0.0  # a dummy
    assert np.isnan(found.errors).all() if samples == 1 else (found.errors < 1e-12).all()


def test_the_mean_over_all_orders_is_the_exact_value() -> None:
    table = np.random.default_rng(0).normal(size=16)
    gains = np.zeros(4)
    for order in permutations(range(4)):
        coalition = 0
        for player in order:
            gains[player] += table[coalition | 1 << player] - table[coalition]
            coalition |= 1 << player
    assert gains / 24 == pytest.approx(shapley(table), abs=1e-12)


@pytest.mark.parametrize("antithetic", [False, True])
def test_one_order_is_efficient(antithetic: bool) -> None:
    table = np.random.default_rng(1).normal(size=32)
    found = by_permutations(game(table), 5, 1, ("one",), antithetic)
    assert found.gap < 1e-9
    assert found.values.sum() == pytest.approx(table[-1] - table[0])


def test_counts_of_evaluations() -> None:
    table = np.arange(8.0)
    assert by_permutations(game(table), 3, 10, ("count",)).evaluations == 10 * 4
    assert by_permutations(game(table), 3, 10, ("count",), antithetic=True).evaluations == 2 * 10 * 4
    assert by_coalitions(game(table), 3, 10, ("count",)).evaluations == 2 * 10 * 3
    assert by_permutations(game(table), 3, 100, ("count",), cached=True).evaluations == 8
    assert by_coalitions(game(table), 3, 100, ("count",), cached=True).evaluations == 8


def test_a_cache_changes_nothing_but_the_count() -> None:
    table = np.random.default_rng(2).normal(size=16)
    for sampler in (by_permutations, by_coalitions):
        plain, cached = (sampler(game(table), 4, 50, ("cache",), cached=cached) for cached in (False, True))
        assert np.array_equal(plain.samples, cached.samples)


def test_reversed_orders_reduce_the_variance_of_nearly_additive_games() -> None:
    table = additive(np.array([3.0, 1.0, 2.0, 0.5, 1.5])) + 0.2 * np.random.default_rng(3).normal(size=32)
    pairs = np.array([[0.3 * ((c & 0b11) == 0b11) + 0.3 * ((c & 0b1100) == 0b1100)] for c in range(32)])[:, 0]
    errors = [
        np.mean([(by_permutations(game(table + pairs), 5, samples, (seed,), antithetic).values - shapley(table + pairs)) ** 2
                 for seed in range(60)])
        for samples, antithetic in ((40, False), (20, True))
    ]  # fmt: skip
    assert errors[1] < errors[0]


def test_the_bias_of_uniform_coalitions_does_not_shrink() -> None:
    table = UNANIMITY
    few, many = (np.abs(by_coalitions(game(table), 3, samples, ("bias",)).values - 1 / 3).mean() for samples in (500, 8000))
    assert min(few, many) > 0.05


def test_relabelled_players_have_permuted_values() -> None:
    table = np.random.default_rng(4).normal(size=8)
    order = [2, 0, 1]
    renamed = np.array([table[sum(1 << old for new, old in enumerate(order) if c >> new & 1)] for c in range(8)])
    for value in (shapley, banzhaf):
        assert value(renamed) == pytest.approx(value(table)[order])


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(CoalitionError, match=r"the value of coalition \d+ is nan, not a finite number"):
        by_permutations(lambda coalition, sample: float("nan"), 2, 1, ("nan",))


def test_shapiq_agrees() -> None:
    shapiq = pytest.importorskip("shapiq")
    players, table = 6, np.random.default_rng(5).normal(size=64)
    bits = 1 << np.arange(players)
    computer = shapiq.ExactComputer(n_players=players, game=lambda coalitions: table[coalitions.astype(int) @ bits])
    for name, value in (("SV", shapley), ("BV", banzhaf)):
        found = computer(index=name, order=1)
        expected = np.array([found[(player,)] for player in range(players)])
        assert value(table) == pytest.approx(expected, abs=1e-9)
