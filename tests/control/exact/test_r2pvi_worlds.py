"""R2PVI beyond the paper's problem: the frozen lake against Gymnasium's, runs there, and regressions weighted by variances."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from stages.control.exact.frozen_lake import FIELDS, frozen_lake
from stages.control.exact.linear_mdp import expectation, play, policy_value, robust_values, simulated
from stages.control.exact.r2pvi import Regression, dual, learn, run, worst_case
from stages.control.exact.settings import LinearPvi
from stages.control.exact.tabular import backward_induction, of_gymnasium


def test_the_lake_is_gymnasiums() -> None:
    """Values of its best policy are those of the list of transitions; the reward comes a step later."""
    gymnasium = pytest.importorskip("gymnasium")
    made = gymnasium.make("FrozenLake-v1").unwrapped
    assert [b"".join(row).decode() for row in made.desc] == list(FIELDS)
    for slippery, slip in ((True, 2 / 3), (False, 0.0)):
        transitions = gymnasium.make("FrozenLake-v1", is_slippery=slippery).unwrapped.P
        kernel = frozen_lake(3, slip).kernel(0)
        for state, action in np.ndindex(16, 4):
            if FIELDS[state // 4][state % 4] in "HG":
                assert kernel[state, action, 16] == 1.0
                continue
            expected = np.zeros(17)
            for chance, following, *_ in transitions[state][action]:
                expected[following] += chance
            assert kernel[state, action] == pytest.approx(expected)
    best, policy = robust_values(frozen_lake(30, 2 / 3), expectation)
    assert best == pytest.approx(backward_induction(of_gymnasium("FrozenLake-v1", 30, 1.0))[1][0, 0])
    assert policy_value(frozen_lake(30, 2 / 3), policy) == pytest.approx(best)


def test_without_slipping_the_goal_is_six_steps_away() -> None:
    assert robust_values(frozen_lake(6, 0.0), expectation)[0] == 1.0
    assert robust_values(frozen_lake(5, 0.0), expectation)[0] == 0.0


def test_robust_values_of_the_lake_fall_with_the_divergences_freedom() -> None:
    lake = frozen_lake(20, 2 / 3)
    nominal = robust_values(lake, expectation)[0]
    for kind in ("tv", "kl", "chi2"):
        found = [robust_values(lake, dual(kind, weight))[0] for weight in (0.05, 0.2, 1.0)]
        assert 0.0 <= found[0] < found[1] < found[2] < nominal + 1e-9


def test_a_run_on_the_lake_learns_and_says_what_slipping_costs() -> None:
    found = run(LinearPvi(world="frozen_lake", robust="tv", divergence_weight=0.2, beta=0.01, episodes=3000))
    assert found == run(LinearPvi(world="frozen_lake", robust="tv", divergence_weight=0.2, beta=0.01, episodes=3000))
    names = [f"return_{percent}" for percent in range(0, 101, 10)]
    assert found["return_mean"] == pytest.approx(np.mean([found[name] for name in names]))
    assert found["return_70"] > 0.05
    best = robust_values(frozen_lake(30, 0.7), expectation)[0]
    assert found["return_70"] < best
    strict = run(LinearPvi(world="frozen_lake", robust="tv", beta=1.0, episodes=200))
    assert strict["return_70"] == 0.0  # the pessimism of few visits is above every value


def test_levels_above_the_values_make_no_difference() -> None:
    """But for the grid: at most a little below what a finer one finds."""
    regression, values = Regression(np.tile([1.0, 0.0], (4, 1)), 1e-9), np.array([0.0, 0.05, 0.1, 0.2])
    for robust in ("chi2", "tv_constrained"):
        settings = LinearPvi.model_validate({"robust": robust})
        coarse, fine = worst_case(regression, values, 31, settings)[0], worst_case(regression, values, 0.2, settings)[0]
        assert coarse - 1e-12 <= fine <= coarse + 0.05


def test_weighted_regression_by_hand() -> None:
    """Targets 1 and 3 of one feature, the second counting half, ridge 0.5: (1 + 1.5) / (1.5 + 0.5) = 1.25."""
    features, targets = np.ones((2, 1)), np.array([1.0, 3.0])
    assert Regression(features, 0.5, np.array([1.0, 0.5]))(targets) == pytest.approx([1.25])
    assert Regression(features, 0.5)(targets) == pytest.approx([1.6])
    assert Regression(features, 1e-12).variance(targets) == pytest.approx([1.0, 1.0])  # of mean 2 and mean square 5
    assert Regression(features, 1e-12).variance(np.array([2.0, 2.0])) == pytest.approx([0.0, 0.0], abs=1e-6)


def test_variances_count_where_they_exceed_the_least() -> None:
    """In the paper's problem none exceeds 1, the default: nothing changes but the last bits, since BLAS may sum a matrix times
    itself in another order. With 0.05, next values that vary count less, and those that do not vary more, with less penalty."""
    mdp = simulated()
    data = play(mdp, 300, np.random.default_rng(1))
    plain, same, weighted = (
        learn(mdp, data, LinearPvi.model_validate({"robust": "tv", "divergence_weight": 1.9, **values}))
        for values in ({}, {"weighting": "variance"}, {"weighting": "variance", "least_variance": 0.05})
    )
    assert np.array_equal(plain.policy, same.policy)
    assert np.allclose(plain.values, same.values, rtol=0, atol=1e-12)
    assert np.allclose(plain.penalties, same.penalties, rtol=0, atol=1e-12)
    assert (weighted.penalties <= plain.penalties + 1e-12).all()
    assert weighted.penalties[0, 0].mean() < plain.penalties[0, 0].mean()
    # the last step has next values of 0, which do not vary: each row counts 1 / 0.05
    rows = mdp.features[data.states[:, 2], data.actions[:, 2]]
    inverse = np.linalg.inv(20.0 * rows.T @ rows + 0.1 * np.eye(4))
    assert weighted.penalties[2] == pytest.approx(np.sqrt((mdp.features**2 * np.diag(inverse)).sum(-1)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"world": "cliff"}, "Input should be 'simulated' or 'frozen_lake'"),
        ({"horizon": 3}, "horizon has no effect: it needs world: frozen_lake"),
        ({"slip": 0.1}, "slip has no effect: it needs world: frozen_lake"),
        ({"world": "frozen_lake", "delta": 0.4}, "delta has no effect: it needs world: simulated"),
        ({"world": "frozen_lake", "strength": 0.1}, "strength has no effect: it needs world: simulated"),
        ({"least_variance": 0.5}, "least_variance has no effect: it needs weighting: variance"),
        ({"weighting": "count"}, "Input should be 'none' or 'variance'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LinearPvi.model_validate(values)
