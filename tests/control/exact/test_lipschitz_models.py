"""Learnt models on a line: Wasserstein distances and slopes by hand, the bounds of the papers, generalised value iteration."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from stages.control.exact.lipschitz_models import (
    MOST_SWEEPS,
    iterate,
    kernel_constant,
    learnt_kernel,
    limited,
    lipschitz,
    of_samples,
    operate,
    policy_value,
    run,
    wasserstein,
    world,
)
from stages.control.exact.settings import LipschitzModel

NON_EXPANSIONS = ("max", "mean", "mellowmax")


def settings(**values: object) -> LipschitzModel:
    return LipschitzModel.model_validate({"states": 21, **values})


def test_wasserstein_distances_by_hand() -> None:
    """On 0, 0.5, 1: from one end to the other 1; half of the mass by a step 0.25; equal ones 0."""
    one, other, split = np.array([1.0, 0, 0]), np.array([0, 0, 1.0]), np.array([0.5, 0.5, 0])
    assert wasserstein(one, other, 0.5) == pytest.approx(1.0)
    assert wasserstein(one, split, 0.5) == pytest.approx(0.25)
    assert wasserstein(np.stack([one, other]), np.stack([one, other]), 0.5).tolist() == [0.0, 0.0]


def test_slopes_by_hand() -> None:
    place = np.array([0.0, 0.5, 1.0])
    assert lipschitz(np.array([0.0, 1.0, 1.5]), place) == 2.0
    assert lipschitz(np.array([[0.0, 0.0], [1.0, -3.0], [1.5, 0.0]]), place) == 6.0
    assert lipschitz(np.arange(5.0) ** 2, np.arange(5.0)) == 7.0
    still = np.eye(3)[:, None]
    assert kernel_constant(still, place) == pytest.approx(1.0)
    assert kernel_constant(still[[1, 1, 1]], place) == 0.0


def test_values_of_a_limited_slope() -> None:
    """(0, 4, 0) at slope 1 over distances of 1: below (0, 1, 0), above (3, 4, 3), halfway (1.5, 2.5, 1.5)."""
    place = np.arange(3.0)
    assert limited(np.array([0.0, 4.0, 0.0]), place, 1.0).tolist() == [1.5, 2.5, 1.5]
    flat = np.array([0.0, 0.5, 1.0])
    assert limited(flat, place, 1.0).tolist() == flat.tolist()
    assert limited(flat, place, None) is flat
    rng = np.random.default_rng(0)
    for one, other in rng.normal(size=(50, 2, 3)):
        found = [limited(values, place, 0.7) for values in (one, other)]
        assert lipschitz(found[0], place) <= 0.7 + 1e-12
        assert np.abs(found[0] - found[1]).max() <= np.abs(one - other).max() + 1e-12


def test_models_of_samples_by_hand() -> None:
    drawn = np.array([[[0, 2, 2, 2]]])
    chosen = settings(states=3)
    assert of_samples(drawn, chosen)[0, 0].tolist() == [0.0, 0.0, 1.0]  # the mean 1.5 rounds to the even 2
    assert of_samples(drawn, settings(states=3, model="probabilistic"))[0, 0].tolist() == [0.25, 0.0, 0.75]
    for values in ({}, {"members": 5}, {"model": "probabilistic", "members": 5}):
        kernel = learnt_kernel(settings(**values), world(chosen := settings(**values)))
        assert np.allclose(kernel.sum(-1), 1.0)
        assert (kernel >= 0).all()
    many = settings(model="probabilistic", samples=5000)
    assert float(wasserstein(learnt_kernel(many, world(many)), world(many).kernel, 1 / 20).max()) < 0.01


@pytest.mark.parametrize("operator", NON_EXPANSIONS)
@pytest.mark.parametrize("slope", [None, 4.0])
def test_value_iteration_converges_to_its_fixed_point_within_the_bounds(operator: str, slope: float | None) -> None:
    """V = P_L f(r + gamma T V); K(V) <= K(R) / (1 - gamma K(T)) in the true model; errors of values and of one backup are within
    their bounds, whatever the model's error."""
    for seed in range(6):
        chosen = settings(operator=operator, slope=slope, seed=seed, samples=1 + seed)
        at = world(chosen)
        kernel = learnt_kernel(chosen, at)
        actions, values, sweeps = iterate(chosen, at, kernel, slope)
        assert sweeps < MOST_SWEEPS
        assert np.allclose(actions, at.reward + chosen.gamma * kernel @ values, atol=1e-7)
        assert np.allclose(values, limited(operate(chosen, actions), at.place, slope), atol=1e-7)
        found = run(chosen)
        assert found["true_slope"] <= found["slope_bound"]
        assert found["bellman_gap"] <= found["gap_bound"] + 1e-9
        if slope is None:
            assert found["value_error"] <= found["bound"] + 1e-6
        else:
            assert found["slope"] <= slope + 1e-9


def test_operators_by_hand() -> None:
    """Of Q = (0, ln 3) at temperature 1: mellowmax ln 2, boltzmann 3/4 ln 3; a cold mellowmax is the maximum less a little."""
    values = np.array([[0.0, np.log(3.0)]])
    assert operate(settings(operator="mellowmax", temperature=1.0), values) == pytest.approx(np.log(2.0))
    assert operate(settings(operator="boltzmann", temperature=1.0), values) == pytest.approx(0.75 * np.log(3.0))
    assert operate(settings(operator="mellowmax", temperature=1e-3), values) == pytest.approx(np.log(3.0), abs=1e-3)
    assert operate(settings(operator="mean"), values) == pytest.approx(np.log(3.0) / 2)


def test_boltzmann_is_no_non_expansion() -> None:
    """Around Q = (0, 2) it rises by more than the larger value does; the others do not."""
    hot = settings(operator="boltzmann", temperature=1.0)
    rise = [float(operate(hot, np.array([[0.0, gap]]))[0]) for gap in (2.0, 2.01)]
    assert (rise[1] - rise[0]) / 0.01 > 1.0
    for name in NON_EXPANSIONS:
        chosen = settings(operator=name)
        assert (
            float(operate(chosen, np.array([[0.0, 2.01]]))[0]) - float(operate(chosen, np.array([[0.0, 2.0]]))[0])
        ) <= 0.01 + 1e-12


def test_a_perfect_model_has_no_suboptimality() -> None:
    many = settings(model="probabilistic", samples=20_000)
    assert run(many)["suboptimality"] < 1e-3
    at = world(many)
    _, best, _ = iterate(many, at, at.kernel, None)
    greedy = (at.reward + many.gamma * at.kernel @ best).argmax(1)
    assert np.allclose(policy_value(many, at, greedy), best, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.5}, "temperature has no effect: it needs operator: mellowmax or boltzmann"),
        ({"model": "gaussian"}, "Input should be 'deterministic' or 'probabilistic'"),
        ({"slope": 0.0}, "greater than 0"),
        ({"gamma": 1.0}, "less than 1"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**values)
