"""Bradley-Terry and Thurstone: hand-computed numbers, other packages' fits, covariance by finite differences."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_ndtr
from scipy.stats import norm

from stages.judging.ratings import Ratings, _terms, fit, win_counts


def share(ratings: Ratings, first: int, second: int, model: str) -> float:
    """P(first beats second)."""
    gap = ratings.strengths[first] - ratings.strengths[second]
    return float(norm.cdf(gap)) if model == "thurstone" else 1 / (1 + math.exp(-gap))


def results(count: int, games: int, seed: int = 0) -> list[tuple[int, int, float]]:
    rng, truth = Random(seed), [place / 3 for place in range(count)]
    drawn = []
    for _ in range(games):
        one, other = rng.sample(range(count), 2)
        drawn.append((one, other, float(rng.random() < 1 / (1 + math.exp(truth[other] - truth[one])))))
    return drawn


@pytest.mark.parametrize(("model", "expected"), [("bradley_terry", math.log(3)), ("thurstone", norm.ppf(0.75))])
def test_two_players(model, expected: float) -> None:
    """Three wins of four: F(difference) = 3/4."""
    found = fit(np.array([[0.0, 3.0], [1.0, 0.0]]), model, ridge=0.0)
    assert found.strengths[0] - found.strengths[1] == pytest.approx(expected)
    assert found.strengths.sum() == pytest.approx(0)
    assert share(found, 0, 1, model) == pytest.approx(0.75)


def test_thurstone_adds_gaps() -> None:
    """The paper's worked example: P(a > b) = P(b > c) = 0.8 gives P(a > c) = 0.9538."""
    wins = np.array([[0.0, 0.8, 0.0], [0.2, 0.0, 0.8], [0.0, 0.2, 0.0]])
    assert share(fit(wins, "thurstone", ridge=0.0), 0, 2, "thurstone") == pytest.approx(0.9538, abs=1e-4)


def test_agrees_with_choix() -> None:
    choix = pytest.importorskip("choix")
    games = results(6, 200)
    pairs = [(one, other) if score else (other, one) for one, other, score in games]
    for ridge in (0.2, 2.0):
        theirs = choix.opt_pairwise(6, pairs, alpha=ridge / 2, method="Newton-CG", tol=1e-10)
        np.testing.assert_allclose(fit(win_counts(6, games), ridge=ridge).strengths, theirs, atol=1e-4)


def test_agrees_with_evalica() -> None:
    evalica = pytest.importorskip("evalica")
    games = results(6, 300)
    xs, ys = [f"p{one}" for one, _, _ in games], [f"p{other}" for _, other, _ in games]
    winners = [evalica.Winner.X if score else evalica.Winner.Y for _, _, score in games]
    theirs = evalica.bradley_terry(xs, ys, winners, tolerance=1e-12, limit=10_000).scores
    logs = np.log([theirs[f"p{player}"] for player in range(6)])
    found = fit(win_counts(6, games), ridge=0.0).strengths
    np.testing.assert_allclose(found, logs - logs.mean(), atol=1e-4)


@pytest.mark.parametrize("ridge", [0.1, 1.0])
def test_thurstone_agrees_with_a_search_that_knows_only_the_likelihood(ridge: float) -> None:
    """Strengths by Nelder and Mead's simplex on the likelihood alone; standard errors by its curvature in finite differences."""
    games = results(4, 60, seed=3)
    one, other, score = (np.array(column) for column in zip(*games, strict=True))

    def loss(strengths: NDArray) -> float:
        ahead = strengths[one] - strengths[other]
        won = score * log_ndtr(ahead) + (1 - score) * log_ndtr(-ahead)
        return -float(won.sum()) + ridge / 2 * float((strengths**2).sum())

    best = minimize(loss, np.zeros(4), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 20_000}).x
    found = fit(win_counts(4, games), "thurstone", ridge)
    np.testing.assert_allclose(found.strengths, best, atol=1e-5)
    curvature, step = np.zeros((4, 4)), 1e-3 * np.eye(4)
    for row in range(4):
        for column in range(4):
            ends = ((best + up * step[row] + right * step[column], up * right) for up in (1, -1) for right in (1, -1))
            curvature[row, column] = sum(sign * loss(at) for at, sign in ends) / 4e-6
    np.testing.assert_allclose(found.errors, np.sqrt(np.diagonal(np.linalg.inv(curvature))), rtol=1e-3)


@pytest.mark.parametrize("model", ["bradley_terry", "thurstone"])
def test_gradient_and_hessian_by_finite_differences(model) -> None:
    wins, at = win_counts(4, results(4, 30)), np.array([0.3, -0.2, 0.5, -0.4])
    _, gradient, hessian = _terms(at, wins, model, 0.3)
    for player in range(4):
        step = np.zeros(4)
        step[player] = 1e-5
        up, down = _terms(at + step, wins, model, 0.3), _terms(at - step, wins, model, 0.3)
        assert (up[0] - down[0]) / 2e-5 == pytest.approx(gradient[player], abs=1e-6)
        np.testing.assert_allclose((up[1] - down[1]) / 2e-5, hessian[player], atol=1e-5)
    np.testing.assert_allclose(
        fit(wins, model, 0.3).covariance @ _terms(fit(wins, model, 0.3).strengths, wins, model, 0.3)[2], np.eye(4), atol=1e-8
    )


def test_ties_are_half_wins_and_ridge_shrinks() -> None:
    assert fit(win_counts(2, [(0, 1, 0.5)] * 4)).strengths == pytest.approx([0.0, 0.0])
    beaten = win_counts(2, [(0, 1, 1.0)] * 4)
    strengths = [fit(beaten, ridge=ridge).strengths[0] for ridge in (0.1, 1.0, 10.0)]
    assert strengths == sorted(strengths, reverse=True)
    assert strengths[-1] > 0


@pytest.mark.parametrize("model", ["bradley_terry", "thurstone"])
def test_unbeaten_player_needs_a_ridge(model) -> None:
    beaten = win_counts(2, [(0, 1, 1.0)] * 4)
    with pytest.raises(ValueError, match="ridge"):
        fit(beaten, model, ridge=0.0)
    assert np.isfinite(fit(beaten, model, ridge=0.01).covariance).all()


def test_errors_fall_with_the_root_of_the_games() -> None:
    games = results(4, 400)
    few, many = fit(win_counts(4, games), ridge=0.0), fit(4 * win_counts(4, games), ridge=0.0)
    np.testing.assert_allclose(many.errors, few.errors / 2, rtol=1e-6)


def test_wrong_matrices_are_refused() -> None:
    for wins in (np.zeros((2, 3)), -np.ones((2, 2))):
        with pytest.raises(ValueError, match="square matrix"):
            fit(wins)
