"""Risk-averse equilibria: the paper's worked examples, brute force, what they reduce to, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from stages.control.games import matrix_games
from stages.control.games.matrix_games import evaluate, run, safe_actions, tables
from stages.control.games.risk_averse import (
    best_response,
    exploitability,
    fictitious_play,
    floored,
    moments,
    on_simplex,
    utility,
)
from stages.control.games.settings import PAYOFFS, MatrixGame, RiskAversion

STAG = np.array([[4.0, 0.0], [3.0, 3.0]])
PENNIES = np.array([[1.0, -1.0], [-1.0, 1.0]])


def aversion(gamma: float, **values: Any) -> RiskAversion:
    return RiskAversion.model_validate({"gamma": gamma, "floor": 0.0, **values})


def symmetric(matrix: np.ndarray) -> list[np.ndarray]:
    return [matrix, matrix.T]


def mixed(first: float) -> np.ndarray:
    return np.array([first, 1.0 - first])


@pytest.mark.parametrize(("gamma", "expected"), [(0.5, 0.4167), (0.2, 1.0), (0.0, 1.0)])
def test_best_responses_in_the_stag_hunt(gamma: float, expected: float) -> None:
    mean, covariance = moments(STAG, mixed(0.9))
    assert mean == pytest.approx([3.6, 3.0])
    assert covariance == pytest.approx(np.array([[1.44, 0.0], [0.0, 0.0]]))
    assert best_response(STAG, mixed(0.9), aversion(gamma))[0] == pytest.approx(expected, abs=1e-4)


def test_best_responses_in_matching_pennies() -> None:
    mean, covariance = moments(PENNIES, mixed(0.6))
    assert mean == pytest.approx([0.2, -0.2])
    assert covariance == pytest.approx(0.96 * PENNIES)
    assert best_response(PENNIES, mixed(0.6), aversion(0.5))[0] == pytest.approx(0.6042, abs=1e-4)
    assert best_response(PENNIES, mixed(0.5), aversion(0.5))[0] == pytest.approx(0.5)


def test_fictitious_play_in_matching_pennies() -> None:
    found = fictitious_play([PENNIES, -PENNIES], [mixed(0.9), mixed(0.3)], aversion(0.5), 20_000)
    assert np.array(found) == pytest.approx(0.5, abs=1e-3)


def test_the_variance_of_all_draws_makes_responses_pure() -> None:
    """Stag is worth 3.6 - 1.44 gamma: 2.88 at 0.5 and 3.24 at 0.25, against 3."""
    total = aversion(0.5, variance="total")
    assert utility(mixed(1.0), STAG, mixed(0.9), total) == pytest.approx(2.88)
    assert utility(mixed(0.0), STAG, mixed(0.9), total) == pytest.approx(3.0)
    assert best_response(STAG, mixed(0.9), total).tolist() == [0.0, 1.0]
    assert best_response(STAG, mixed(0.9), aversion(0.25, variance="total")).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("gamma", "floor", "start", "stag"),
    [
        (0.0, 0.0, 0.9, True),
        (0.0, 0.0, 1.0, True),
        (0.5, 0.0, 0.9, False),
        (0.5, 0.0, 1.0, True),
        (0.5, 0.1, 0.9, False),
        (0.5, 0.1, 1.0, False),
    ],
)
def test_stag_hunts_from_given_beliefs(gamma: float, floor: float, start: float, stag: bool) -> None:
    found = fictitious_play(symmetric(STAG), [mixed(start)] * 2, aversion(gamma, floor=floor), 5000)
    assert all(strategy[0] > 0.99 if stag else strategy[0] < 0.01 for strategy in found)


def test_without_aversion_it_is_fictitious_play() -> None:
    """To the bit: the answers are the actions of highest mean payoff against the plain averages."""
    average = [mixed(0.9), mixed(0.3)]
    for step in range(200):
        answers = [np.eye(2)[(PENNIES @ average[1]).argmax()], np.eye(2)[(-PENNIES.T @ average[0]).argmax()]]
        average = [old + (answer - old) * (1.0 / (step + 10)) for old, answer in zip(average, answers, strict=True)]
    found = fictitious_play([PENNIES, -PENNIES], [mixed(0.9), mixed(0.3)], aversion(0.0), 200)
    assert np.array_equal(found, average)


@pytest.mark.parametrize("variance", ["opponent_only", "total"])
def test_payoffs_may_be_shifted_and_scaled(variance: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix, facing = rng.normal(size=(3, 4)), rng.dirichlet(np.ones(4))
        plain = best_response(matrix, facing, aversion(0.7, variance=variance))
        assert best_response(matrix + 5.0, facing, aversion(0.7, variance=variance)) == pytest.approx(plain, abs=1e-5)
        assert best_response(4.0 * matrix, facing, aversion(0.175, variance=variance)) == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [([1.0, 0.0], [0.9, 0.1]), ([0.5, 0.5], [0.5, 0.5]), ([0.97, 0.03, 0.0], [0.8, 0.1, 0.1]), ([0.85, 0.105, 0.045], None)],
)
def test_least_probabilities(strategy: list[float], expected: list[float] | None) -> None:
    found = floored(np.array(strategy), 0.1)
    assert found.sum() == pytest.approx(1.0)
    assert found.min() >= 0.1 - 1e-12
    if expected:
        assert found == pytest.approx(expected)


def test_the_closed_form_against_a_grid() -> None:
    rng, grid = np.random.default_rng(1), np.linspace(0, 1, 1001)
    for _ in range(100):
        matrix, facing, settings = rng.normal(size=(2, 2)), rng.dirichlet(np.ones(2)), aversion(float(rng.uniform(0.1, 2)))
        best = max(utility(mixed(first), matrix, facing, settings) for first in grid)
        found = best_response(matrix, facing, settings)
        assert utility(found, matrix, facing, settings) >= best - 1e-9
        nearest = min(grid, key=lambda first: abs(first - found[0]))
        assert utility(mixed(nearest), matrix, facing, settings) == pytest.approx(best, abs=1e-3)


def test_ascent_over_many_actions_beats_random_strategies() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        matrix, facing, settings = rng.normal(size=(4, 5)), rng.dirichlet(np.ones(5)), aversion(0.8)
        found = utility(best_response(matrix, facing, settings), matrix, facing, settings)
        assert found >= max(utility(rng.dirichlet(np.ones(4)), matrix, facing, settings) for _ in range(300)) - 1e-6


def test_the_nearest_strategy() -> None:
    assert on_simplex(np.array([0.2, 0.8])) == pytest.approx([0.2, 0.8])
    assert on_simplex(np.array([2.0, 0.0, -1.0])) == pytest.approx([1.0, 0.0, 0.0])
    assert on_simplex(np.array([0.9, 0.9, 0.0])) == pytest.approx([0.5, 0.5, 0.0])


@pytest.mark.parametrize(("level", "expected"), [(3.0, 0.0), (3.3, 0.5), (3.6, 1.0), (9.0, 1.0), (-1.0, 0.0)])
def test_the_least_variance_at_a_level_of_the_stag_hunt(level: float, expected: float) -> None:
    """Stag has mean 3.6 and variance 1.44, hare 3 and none; gamma is the multiplier: 0.6 / 1.44 leads to the same half."""
    settings = RiskAversion(level=level, floor=0.0)
    assert best_response(STAG, mixed(0.9), settings)[0] == pytest.approx(expected)
    assert best_response(STAG, mixed(0.9), aversion(0.6 / 1.44))[0] == pytest.approx(0.5)
    assert best_response(STAG[::-1], mixed(0.9), settings)[0] == pytest.approx(1.0 - expected)


def test_the_least_variance_at_a_level_of_matching_pennies() -> None:
    """Means 0.2 and -0.2: half of each has no variance, and a mean of 0.1 needs three quarters."""
    found = [best_response(PENNIES, mixed(0.6), RiskAversion(level=level, floor=0.0))[0] for level in (-0.5, 0.1)]
    assert found == pytest.approx([0.5, 0.75])
    assert best_response(np.ones((2, 2)), mixed(0.6), RiskAversion(level=0.0)).tolist() == [1.0, 0.0]


def test_levels_of_many_actions_against_a_grid() -> None:
    rng, grid = np.random.default_rng(3), np.linspace(0, 1, 101)
    points = np.array([(one, other, 1 - one - other) for one in grid for other in grid if one + other <= 1])
    for _ in range(10):
        matrix, facing = rng.normal(size=(3, 4)), rng.dirichlet(np.ones(4))
        mean, covariance = moments(matrix, facing)
        level = 0.3 * mean.min() + 0.7 * mean.max()
        own = best_response(matrix, facing, RiskAversion(level=level, floor=0.0))
        assert own @ mean >= level - 1e-6
        variances = np.einsum("ni,ij,nj->n", points, covariance, points)[points @ mean >= level]
        assert own @ covariance @ own <= variances.min() + 1e-6


def test_what_strategies_miss_at_a_level() -> None:
    """Against stag with the floor: stag for both is 0.3 above 3.3, at a variance of 1.44 instead of the half's 0.36. Hare faces
    (0.1, 0.9), against which no mean above 3 is possible, and is the response."""
    both = [mixed(1.0)] * 2
    assert exploitability(symmetric(STAG), both, RiskAversion(level=3.3)) == pytest.approx(2 * (1.44 - 0.36))
    assert exploitability(symmetric(STAG), [mixed(0.25)] * 2, RiskAversion(level=2.0)) == pytest.approx(
        2 * 0.0625 * 16 * 0.25 * 0.75
    )
    assert exploitability(symmetric(STAG), [mixed(0.0)] * 2, RiskAversion(level=3.3)) == pytest.approx(0.0)
    found = fictitious_play(symmetric(STAG), [mixed(0.9)] * 2, RiskAversion(level=3.0), 2000)
    assert all(strategy[0] < 0.01 for strategy in found)


def test_the_entropy_smooths_the_response() -> None:
    """Without aversion it is the softmax of the means; with little entropy, the response without."""
    smooth = best_response(STAG, mixed(0.9), aversion(0.0, entropy=0.5))
    expected = np.exp(np.array([3.6, 3.0]) / 0.5)
    assert smooth == pytest.approx(expected / expected.sum(), abs=1e-4)
    assert best_response(STAG, mixed(0.9), aversion(0.5, entropy=1e-3))[0] == pytest.approx(0.4167, abs=0.02)


def test_three_players_face_joint_actions() -> None:
    """Each gets 1 if all agree on the first action, and 0.4 for the second in any case: a stag hunt of three."""
    table = np.zeros((2, 2, 2))
    table[0, 0, 0] = 1.0
    payoffs = []
    for player in range(3):
        own = table.copy()
        np.moveaxis(own, player, 0)[1] = 0.4
        payoffs.append(own)
    hunters = fictitious_play(payoffs, [mixed(0.9)] * 3, aversion(0.0), 500)
    assert all(strategy[0] > 0.98 for strategy in hunters)
    careful = fictitious_play(payoffs, [mixed(0.9)] * 3, aversion(3.0, floor=0.1), 500)
    assert all(strategy[0] < 0.2 for strategy in careful)


def test_equilibria_can_not_be_exploited() -> None:
    """The pure equilibria of the stag hunt, found by checking every profile, and one that is none."""
    found = {
        (one, other): exploitability(symmetric(STAG), [np.eye(2)[one], np.eye(2)[other]], aversion(0.5))
        for one in range(2)
        for other in range(2)
    }
    assert found[0, 0] == found[1, 1] == 0.0
    assert min(found[0, 1], found[1, 0]) > 0.5
    floor = aversion(0.5, floor=0.1)
    assert exploitability(symmetric(STAG), [mixed(1.0)] * 2, floor) > 0.1
    assert exploitability(symmetric(STAG), [mixed(0.0)] * 2, floor) == pytest.approx(0.0)


def test_figures_of_the_stag_hunt() -> None:
    """Hare's payoff does not vary; averse players all hunt hares, and neutral ones only where beliefs are low."""
    assert safe_actions(symmetric(STAG)) == [1, 1]
    mean, spread = evaluate(symmetric(STAG), [mixed(1.0)] * 2)
    assert (mean, spread) == pytest.approx((3.8, 4 * np.sqrt(0.95 * 0.05)))
    averse = run(MatrixGame(starts=20, iterations=500))
    neutral = run(MatrixGame(starts=20, iterations=500, gamma=0.0))
    assert averse["safe"] == 1.0
    assert 0.3 < neutral["safe"] < 1.0
    assert averse["spread"] < neutral["spread"]
    assert averse["exploitability"] < 0.1  # averages still hold some of the first beliefs


def test_units_of_payoff() -> None:
    scaled = [[[4 * value for value in row] for row in matrix] for matrix in PAYOFFS["stag_hunt"]]
    plain = run(MatrixGame(starts=5, iterations=100, unit_payoffs=True))
    found = run(MatrixGame(starts=5, iterations=100, unit_payoffs=True, payoffs=scaled))
    assert found["first_action"] == pytest.approx(plain["first_action"])
    assert found["payoff"] == pytest.approx(4 * plain["payoff"])
    assert tables(MatrixGame(unit_payoffs=True, payoffs=[[[1.0, 1.0]]] * 2))[0].tolist() == [[1.0, 1.0]]


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"game": "chicken", "starts": 2, "iterations": 50, "seed": 3}
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text(yaml.safe_dump(values))
    monkeypatch.setattr("sys.argv", ["matrix_games", "--settings", str(settings), "--result", str(result)])
    assert matrix_games.main() == 0
    expected = {f"control.{name}": value for name, value in run(MatrixGame.model_validate(values)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"game": "chess"}, "Input should be 'stag_hunt'"),
        ({"floor": 0.6}, "floor 0.6 is too much for 2 actions; lower it to at most 0.5"),
        ({"payoffs": [[[1.0, 2.0]]]}, "payoffs must be two matrices of one shape"),
        ({"payoffs": [[[1.0, 2.0]], [[1.0], [2.0]]]}, "payoffs must be two matrices of one shape"),
        ({"payoffs": [[[1.0, 2.0], [3.0]]] * 2}, "payoffs must be two matrices of one shape"),
        ({"payoffs": [[[]], [[]]]}, "payoffs: the column player has no action"),
        ({"gamma": 0.0, "variance": "total"}, "variance has no effect: it needs gamma above 0"),
        ({"payoffs": [[[1.0]]] * 2, "game": "chicken"}, "game chicken has no effect with payoffs"),
        ({"gamma": -1.0}, "greater than or equal to 0"),
        ({"level": 3.0, "gamma": 0.5}, "gamma has no effect with level"),
        ({"level": 3.0, "variance": "total"}, "variance: total is not possible with level"),
        ({"level": 3.0, "unit_payoffs": True}, "unit_payoffs is not possible with level"),
        ({"delay": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MatrixGame.model_validate(values)
