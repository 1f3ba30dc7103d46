"""R2PVI: duals against brute force and worked examples, the paper's simulated problem against enumeration, refusals by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError
from scipy.optimize import minimize

from stages.control.exact import r2pvi
from stages.control.exact.linear_mdp import (
    LinearMdp,
    Steps,
    expectation,
    perturbed,
    play,
    policy_value,
    robust_values,
    simulated,
)
from stages.control.exact.r2pvi import Regression, bound, dual, excess, learn, penalty, run, worst_case
from stages.control.exact.settings import LinearPvi

COIN = (np.array([0.0, 1.0]), np.array([0.5, 0.5]))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.25, {"tv": 0.125, "kl": 0.16875, "chi2": 0.25}),
        (1.0, {"tv": 0.5, "kl": 0.37989, "chi2": 0.4375}),
        (0.01, {"tv": 0.005, "kl": 0.00693, "chi2": 0.01}),
        (1e6, {"tv": 0.5, "kl": 0.5, "chi2": 0.5}),
    ],
)
def test_duals_of_a_fair_coin(weight: float, expected: dict[str, float]) -> None:
    found = {kind: dual(kind, weight)(*COIN) for kind in expected}
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["tv", "kl", "chi2"])
def test_duals_are_the_worst_case_of_the_penalised_distribution(kind: str) -> None:
    """The primal by numerical minimisation over distributions."""
    values, weights, weight = np.array([0.3, 1.1, 2.0]), np.array([0.2, 0.5, 0.3]), 0.6

    def divergence(other: np.ndarray) -> float:
        if kind == "tv":
            return float(np.abs(other - weights).sum() / 2)
        if kind == "kl":
            return float((other * np.log(np.maximum(other, 1e-300) / weights)).sum())
        return float(((other - weights) ** 2 / weights).sum())

    best = min(
        minimize(
            lambda other: float(other @ values) + weight * divergence(other),
            start,
            bounds=[(0.0, 1.0)] * 3,
            constraints={"type": "eq", "fun": lambda other: other.sum() - 1},
            options={"ftol": 1e-12},
        ).fun
        for start in (weights, np.array([0.9, 0.05, 0.05]), np.array([0.5, 0.4, 0.1]))
    )
    assert dual(kind, weight)(values, weights) == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize("kind", ["tv", "kl", "chi2"])
def test_duals_grow_with_the_weight_between_minimum_and_mean(kind: str) -> None:
    values, weights = np.array([0.2, 0.9, 1.7, 2.5]), np.array([0.1, 0.4, 0.3, 0.2])
    found = [dual(kind, weight)(values, weights) for weight in (0.01, 0.05, 0.2, 1.0, 5.0)]
    assert found == sorted(found)
    assert values.min() <= found[0]
    assert found[-1] <= weights @ values
    assert dual(kind, 0.3)(np.full(4, 0.7), weights) == pytest.approx(0.7)


def one_hot(values: np.ndarray) -> tuple[Regression, np.ndarray]:
    """A regression of one factor with data, and one without."""
    return Regression(np.tile([1.0, 0.0], (len(values), 1)), 1e-9), values


@pytest.mark.parametrize("kind", ["tv", "kl", "chi2"])
def test_estimates_on_one_hot_features_are_the_empirical_duals(kind: str) -> None:
    values = np.array([0.0, 1.0] * 50)
    settings = LinearPvi(robust=kind, divergence_weight=0.25)
    worst = worst_case(*one_hot(values), 1, settings)
    assert worst[0] == pytest.approx(dual(kind, 0.25)(*COIN), abs=1e-4)


def test_a_factor_without_data() -> None:
    values, regression = np.array([0.5, 1.0]), Regression(np.array([[1.0, 0.0], [1.0, 0.0]]), 0.1)

    def nu(**changes: object) -> float:
        return float(worst_case(regression, values, 3, LinearPvi(divergence_weight=0.1, **changes))[1])

    assert nu(robust="tv") == pytest.approx(0.0)
    assert nu(robust="chi2") == pytest.approx(0.0)
    assert nu(robust="kl", kl_regression="shifted") == pytest.approx(0.0)
    assert nu(robust="kl") == pytest.approx(3.0)


def test_one_sample_with_ridge_one() -> None:
    """The ridge makes raw KL optimistic: above the only value that was seen."""
    regression, values = Regression(np.array([[1.0]]), 1.0), np.array([1.0])
    assert worst_case(regression, values, 3, LinearPvi(robust="kl", divergence_weight=1.0))[0] == pytest.approx(1.693, abs=1e-3)
    shifted = LinearPvi(robust="kl", divergence_weight=1.0, kl_regression="shifted")
    assert worst_case(regression, values, 3, shifted)[0] == pytest.approx(0.380, abs=1e-3)
    assert worst_case(regression, values, 3, LinearPvi(robust="tv", divergence_weight=1.0))[0] == pytest.approx(0.5)


def test_small_weights_do_not_underflow() -> None:
    worst = worst_case(*one_hot(np.array([1.0, 2.0])), 3, LinearPvi(robust="kl", divergence_weight=1e-3))
    assert worst[0] == pytest.approx(1.0 + 1e-3 * np.log(2), abs=1e-6)


def test_the_minimum_of_the_chi2_objective_is_no_dual() -> None:
    settings = LinearPvi(robust="chi2", divergence_weight=0.25, chi2_direction="min")
    assert worst_case(*one_hot(np.array([0.0, 1.0])), 1, settings)[0] == pytest.approx(0.0, abs=1e-6)


def test_penalties_of_two_factors() -> None:
    features, inverse = np.array([0.5, 0.5]), np.diag([0.04, 0.16])
    found = [float(penalty(features, inverse, kind)) for kind in ("quadrature", "sum", "full")]
    assert found == pytest.approx([0.2236, 0.3, 0.2236], abs=1e-4)
    unit = [float(penalty(np.array([0.0, 1.0]), inverse, kind)) for kind in ("quadrature", "sum", "full")]
    assert unit == pytest.approx([0.4] * 3)


def test_large_weights_give_pevi_with_known_rewards() -> None:
    mdp = simulated()
    data = play(mdp, 100, np.random.default_rng(0))
    step, following = 0, np.linspace(0, 2, 100)
    regression = Regression(mdp.features[data.states[:, step], data.actions[:, step]], 0.1)
    for kind, weight, within in (("tv", 3.0, 1e-12), ("kl", 1e8, 1e-6)):
        settings = LinearPvi(robust=kind, divergence_weight=weight, **({"kl_regression": "shifted"} if kind == "kl" else {}))
        assert worst_case(regression, following, 3, settings) == pytest.approx(regression(following), abs=within)
    # chi2 maximises over levels, which is no limit where a regression has negative weights: on one-hot features.
    single, values = one_hot(np.array([0.5, 1.0, 3.0]))
    chi2 = worst_case(single, values, 3, LinearPvi(robust="chi2", divergence_weight=1e8))
    assert chi2 == pytest.approx(single(values), abs=1e-6)


def test_exact_values_of_the_simulated_problem() -> None:
    """By hand: always leaping with 0.5 is best without failures, and worst when each leap fails."""
    mdp = simulated()
    best, policy = robust_values(mdp, expectation)
    x2 = 0.5 + 0.5 * 1 + 0.5 * 0.999 * 0.5
    assert best == pytest.approx(0.5 * 2 + 0.5 * 0.999 * x2)
    assert policy_value(mdp, policy) == pytest.approx(best)
    assert policy_value(perturbed(mdp, 1.0), policy) == pytest.approx(0.5 * 0.999 * x2)
    assert mdp.kernel(0).sum(-1) == pytest.approx(np.ones((5, 16)))


def test_played_episodes_follow_the_kernel() -> None:
    mdp = simulated()
    data = play(mdp, 20000, np.random.default_rng(3))
    assert (data.states[:, 0] == 0).all()
    assert (data.states[:, 1:] == data.following[:, :-1]).all()
    assert (data.following[:, 0] == 4).mean() == pytest.approx(0.3, abs=0.01)


def test_robust_value_is_below_every_perturbation_of_its_size() -> None:
    """A policy's penalised worst case is at most its value under any shift plus the weighted divergence of that shift."""
    mdp, weight = simulated(), 0.5
    _, policy = robust_values(mdp, expectation)
    worst, _ = robust_values(mdp, dual("tv", weight), policy)
    for share in (0.0, 0.3, 0.6, 1.0):
        leap = mdp.features[0, policy[0, 0], 3]
        assert worst <= policy_value(perturbed(mdp, share), policy) + weight * leap * share + 1e-9


def test_pessimism_avoids_what_data_does_not_cover() -> None:
    """Two actions, of which the data has only the first; both lead on, the second to more."""
    features = np.zeros((3, 2, 2))
    features[0] = np.eye(2)
    features[1:, :, 0] = 1.0
    factors = np.zeros((2, 2, 3))
    factors[:, 0, 1] = factors[:, 1, 2] = 1.0
    mdp = LinearMdp(features, np.array([[0.2, 0.3], [0.0, 0.0]]), factors, start=0)
    seen = Steps(np.zeros((50, 2), int), np.zeros((50, 2), int), np.ones((50, 2), int))
    bold = learn(mdp, seen, LinearPvi(robust="kl", kl_regression="shifted", beta=0.0)).policy
    careful = learn(mdp, seen, LinearPvi(robust="kl", kl_regression="shifted", beta=1.0)).policy
    assert (bold[0, 0], careful[0, 0]) == (1, 0)


def leaping(mdp: LinearMdp, leap: float) -> np.ndarray:
    """The policy [H, S] that leaps with one probability everywhere."""
    return np.full((mdp.horizon, len(mdp.features)), int(np.argmin(np.abs(mdp.features[0, :, 3] - leap))))


def test_policies_differ_in_their_robust_value_by_hand() -> None:
    """TV at 1 caps next values at 1. At 0.1 it caps them at 0.1, which nearly every state is worth: all policies are alike."""
    mdp, found = simulated(), {}
    for leap in (0.1, 0.5):
        x2 = leap + leap + (1 - leap) * 0.999 * leap
        found[leap] = leap + (1 - leap) * 0.999 * min(x2, 1.0)
        assert robust_values(mdp, dual("tv", 1.0), leaping(mdp, leap))[0] == pytest.approx(found[leap])
        assert robust_values(mdp, dual("tv", 0.1), leaping(mdp, leap))[0] == pytest.approx(0.1, abs=1e-4)
    assert found[0.5] - found[0.1] > 0.6


def test_bounds_by_hand() -> None:
    """Penalties of 0.1 in each of three steps: twice 0.3. What happens in the failure state or in one that no factor reaches does
    not count, unless a divergence can move mass there; a difference of values is at most the steps that are left."""
    mdp = simulated()
    policy, penalties = leaping(mdp, 0.5), np.full((3, 5, 16), 0.1)
    penalties[:, mdp.fail] = penalties[1:, 0] = penalties[0, 1:] = 7.0
    for kind in ("tv", "kl", "chi2"):
        assert bound(mdp, policy, penalties, kind) == pytest.approx(0.6)
    x2 = 0.2 + 0.5 * 0.999 * 0.2 + 0.5 * 0.2
    assert bound(mdp, policy, penalties, "none") == pytest.approx(0.2 + 0.5 * 0.999 * x2 + 0.5 * 0.4)
    assert bound(mdp, policy, np.full((3, 5, 16), 7.0), "kl") == 3.0
    nowhere, penalties = replace(mdp, fail=None), np.full((3, 5, 16), 0.1)
    penalties[1, 0] = 0.3
    assert bound(nowhere, policy, penalties, "kl") == pytest.approx(0.6)
    assert bound(nowhere, policy, penalties, "tv") == pytest.approx(0.2 + 0.6 + 0.2)


def test_excess_by_hand() -> None:
    """The data lack the second action, whose next value is 0.5 and estimated as 0; pessimism of 1 / sqrt(0.1) covers that."""
    features = np.zeros((3, 2, 2))
    features[0] = np.eye(2)
    features[1:, :, 0] = 1.0
    factors = np.zeros((2, 2, 3))
    factors[:, 0, 1] = factors[:, 1, 2] = 1.0
    mdp = LinearMdp(features, np.array([[0.2, 0.3], [0.5, 0.0]]), factors, start=0)
    seen = Steps(np.zeros((50, 2), int), np.zeros((50, 2), int), np.ones((50, 2), int))
    for beta, expected in ((0.0, 0.5), (1.0, 0.0)):
        settings = LinearPvi(robust="kl", kl_regression="shifted", beta=beta)
        found = excess(mdp, learn(mdp, seen, settings), dual("kl", settings.divergence_weight))
        assert found == pytest.approx(expected) if beta == 0.0 else found < expected


@pytest.mark.parametrize(
    "settings",
    [{"robust": "tv", "divergence_weight": 1.9}, {"robust": "kl", "kl_regression": "shifted", "divergence_weight": 0.3}],
)
def test_suboptimality_and_its_bound_fall_with_data(settings: dict[str, object]) -> None:
    """Contract: no bound is below what it bounds, and ten times the data lower it to about a third; that of 100 episodes already
    says something: no return exceeds 2."""
    means = []
    for episodes in (100, 1000, 10_000):
        found = [run(LinearPvi(episodes=episodes, seed=seed, **settings)) for seed in range(8)]
        assert all(0 <= one["suboptimality"] + 1e-12 <= one["bound"] for one in found)
        means.append([float(np.mean([one[name] for one in found])) for name in ("suboptimality", "bound")])
    (first, large), (second, middle), (third, small) = means
    assert first > 0.02
    assert 0.0 <= third <= second < first / 4
    assert third == pytest.approx(0.0, abs=1e-12)
    assert large < 2
    assert middle / large == pytest.approx(1 / np.sqrt(10), rel=0.1)
    assert small / middle == pytest.approx(1 / np.sqrt(10), rel=0.1)


@pytest.mark.parametrize("kind", ["none", "tv", "kl", "chi2"])
def test_bounds_hold_wherever_no_error_exceeds_its_penalty(kind: str) -> None:
    """The premise fails for KL at a small weight, whose errors grow as exp(H / weight), and with it the bound of beta 1."""
    weights = (0.1, 0.5, 1.9) if kind != "none" else (0.1,)
    covered = broken = 0
    for weight in weights:
        for seed in range(4):
            one = run(LinearPvi(robust=kind, episodes=1000, seed=seed, divergence_weight=weight))
            assert one["excess"] > 0 or one["suboptimality"] <= one["bound"] + 1e-12
            covered += one["excess"] <= 0
            broken += one["suboptimality"] > one["bound"]
    assert covered > 0
    assert (broken > 0) == (kind == "kl")


def test_runs_are_repeatable_and_robust_ones_lose_less() -> None:
    pevi, tv = (run(LinearPvi(robust=kind, seed=1)) for kind in ("none", "tv"))
    assert run(LinearPvi(robust="tv", seed=1)) == tv
    assert pevi["return_0"] > tv["return_0"]
    assert tv["return_100"] > pevi["return_100"]
    assert tv["suboptimality"] == tv["suboptimality_tv"]
    assert not {"suboptimality", "bound", "excess"} & set(run(LinearPvi(robust="tv_constrained", seed=1)))


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text(yaml.safe_dump({"robust": "chi2", "seed": 2}))
    monkeypatch.setattr("sys.argv", ["r2pvi", "--settings", str(settings), "--result", str(result)])
    assert r2pvi.main() == 0
    expected = {f"control.{name}": value for name, value in run(LinearPvi(robust="chi2", seed=2)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"robust": "hellinger"}, "Input should be 'none', 'tv'"),
        ({"strength": 0.4}, "lower strength to at most 0.3"),
        ({"robust": "tv", "radius": 0.5}, "radius has no effect with robust: tv; remove it"),
        ({"robust": "none", "divergence_weight": 0.2}, "divergence_weight has no effect"),
        ({"robust": "none", "penalty": "sum"}, "penalty has no effect with robust: none; remove it"),
        ({"ridge": 0.0}, "greater than 0"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LinearPvi.model_validate(values)


def test_shifts_change_the_first_step_only() -> None:
    mdp = simulated()
    shifted = perturbed(mdp, 0.4)
    assert (shifted.factors[1:] == mdp.factors[1:]).all()
    assert shifted.factors[0, 3].tolist() == [0.0, 0.0, 0.0, 0.4, 0.6]
