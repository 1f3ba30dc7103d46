"""Risk-averse equilibria: players weigh the variance of their payoff that comes from their co-players' draws.

After Slumbers et al., arXiv 2205.15434, whose exact definition was not available: utilities are of the standard mean-variance
form, and the least probabilities of co-players' actions, without which a pure co-player is no risk, are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from stages.control.games.settings import RiskAversion
from stages.records.card import Card

CARD = Card(
    slug="risk_averse_equilibrium",
    title="Risk-averse equilibria",
    paper="Slumbers et al., arXiv 2205.15434",
    equation="each player maximises x . M s - gamma Var, Var = x' D diag(s) D' x with D = M - M s 1' (opponent_only), s the "
    "co-players' joint strategy with least probabilities; by fictitious play with steps 1 / (t + 10)",
    assumptions="known payoffs; co-players may deviate with small probability",
    reduces_to="gamma 0, floor 0: fictitious play towards Nash equilibria",
    tested_by="tests/control/games/test_risk_averse.py, tests/control/games/test_psro.py",
    switch="gamma of environments matrix_game and driving_game, lane control",
)
Array = NDArray[np.float64]
ASCENT_STEPS = 500
CONVERGED = 1e-8


def floored(strategy: Array, least: float) -> Array:
    """The strategy [n] with every probability at least `least`, which is at most 1 / n: lower ones are raised, the others scaled
    down in proportion."""
    raised = strategy < least
    while True:
        rest = strategy[~raised].sum()
        found = np.where(raised, least, strategy * ((1.0 - least * raised.sum()) / rest if rest else 0.0))
        if not (more := ~raised & (found < least)).any():
            return found
        raised |= more


def moments(payoffs: Array, strategy: Array) -> tuple[Array, Array]:
    """Mean [m] and covariance [m, m] of the actions' payoffs [m, n] over the co-players' strategy [n]."""
    mean = payoffs @ strategy
    centred = payoffs - mean[:, None]
    return mean, (centred * strategy) @ centred.T


def utility(own: Array, payoffs: Array, strategy: Array, settings: RiskAversion, noise: Array | None = None) -> float:
    """Of the strategy `own` [m] against `strategy` [n]. noise [m, n]: variance of the payoff of each pair of actions, which adds
    own . noise s to the variance."""
    mean, covariance = moments(payoffs, strategy)
    value = float(own @ mean)
    within = 0.0 if noise is None else settings.gamma * float(own @ noise @ strategy)
    if settings.variance == "opponent_only":
        return value - settings.gamma * float(own @ covariance @ own) - within
    return value - settings.gamma * (float(own @ (payoffs**2 @ strategy)) - value**2) - within


def best_response(payoffs: Array, strategy: Array, settings: RiskAversion, noise: Array | None = None) -> Array:
    """The strategy [m] of highest utility against `strategy` [n]; ties: the first action. noise: as in `utility`. Its part is
    linear in the own strategy, as the mean is, and is subtracted from that. Raises ValueError for noise with an entropy bonus."""
    mean, covariance = moments(payoffs, strategy)
    if settings.entropy:
        if noise is not None:
            raise ValueError("noise: responses with an entropy bonus have no variance within pairs; set entropy to 0")
        return _smoothed(payoffs, strategy, settings)
    if settings.level is not None:
        return _of_level(mean, covariance, settings.level)
    if noise is not None:
        mean = mean - settings.gamma * (noise @ strategy)
    if settings.variance == "total":  # convex in the own strategy: the best one is pure
        return _pure(mean - settings.gamma * np.diag(covariance))
    if settings.gamma == 0:
        return _pure(mean)
    if len(mean) == 2:
        return _of_two(mean, covariance, settings.gamma)
    return _projected_ascent(mean, covariance, settings.gamma)


def _pure(values: Array) -> Array:
    return np.eye(len(values))[values.argmax()]


def _of_two(mean: Array, covariance: Array, gamma: float) -> Array:
    spread = covariance[0, 0] - 2 * covariance[0, 1] + covariance[1, 1]
    if spread <= 0:
        return _pure(mean)
    first = ((mean[0] - mean[1]) / (2 * gamma) + covariance[1, 1] - covariance[0, 1]) / spread
    return np.array([(clipped := min(max(first, 0.0), 1.0)), 1.0 - clipped])


def _of_level(mean: Array, covariance: Array, level: float) -> Array:
    """The least variance at a mean of at least `level`; the highest mean where that is not possible."""
    if mean.max() <= level:
        return _pure(mean)
    if len(mean) == 2:
        spread, gap = covariance[0, 0] - 2 * covariance[0, 1] + covariance[1, 1], mean[0] - mean[1]
        if spread <= 0:
            return _pure(mean)
        first = min(max((covariance[1, 1] - covariance[0, 1]) / spread, 0.0), 1.0)
        if gap:
            bound = (level - mean[1]) / gap
            first = max(first, bound) if gap > 0 else min(first, bound)
        return np.array([first, 1.0 - first])
    found = minimize(
        lambda own: own @ covariance @ own,
        _pure(mean),
        jac=lambda own: 2.0 * covariance @ own,
        bounds=[(0.0, 1.0)] * len(mean),
        constraints=[
            {"type": "eq", "fun": lambda own: own.sum() - 1.0},
            {"type": "ineq", "fun": lambda own: own @ mean - level},
        ],
        method="SLSQP",
        options={"ftol": CONVERGED**2, "maxiter": ASCENT_STEPS},
    )
    return on_simplex(found.x)


def _projected_ascent(mean: Array, covariance: Array, gamma: float) -> Array:
    found = _pure(mean)
    stride = 1.0 / (2.0 * gamma * np.linalg.eigvalsh(covariance)[-1] + CONVERGED)
    for _ in range(ASCENT_STEPS):
        moved = on_simplex(found + stride * (mean - 2 * gamma * covariance @ found))
        change, found = np.abs(moved - found).max(), moved
        if change < CONVERGED:
            break
    return found


def on_simplex(point: Array) -> Array:
    """The nearest strategy [m]."""
    ordered = np.sort(point)[::-1]
    excess = (ordered.cumsum() - 1.0) / np.arange(1, len(point) + 1)
    return np.maximum(point - excess[ordered > excess][-1], 0.0)


def _smoothed(payoffs: Array, strategy: Array, settings: RiskAversion) -> Array:
    """Best response with an entropy bonus, by mirror ascent; for variance total, a stationary point."""
    mean, covariance = moments(payoffs, strategy)
    found = np.full(len(mean), 1.0 / len(mean))
    curve = 2.0 * settings.gamma * (np.abs(covariance).max() + np.abs(mean).max() ** 2)
    stride = 1.0 / (curve + settings.entropy)
    for _ in range(ASCENT_STEPS):
        if settings.variance == "opponent_only":
            slope = mean - 2 * settings.gamma * covariance @ found
        else:
            slope = mean - settings.gamma * (payoffs**2 @ strategy - 2 * (found @ mean) * mean)
        logits = np.log(found) + stride * (slope - settings.entropy * np.log(found))
        moved = np.exp(logits - logits.max())
        moved = np.maximum(moved / moved.sum(), 1e-300)
        change, found = np.abs(moved - found).max(), moved
        if change < CONVERGED:
            break
    return found


def against(payoffs: Array, strategies: Sequence[Array], player: int, least: float) -> tuple[Array, Array]:
    """Payoffs [m, n] of a player by its own action and its co-players' joint action, from a table with an axis per player, and
    the joint distribution [n] of the co-players' strategies with least probabilities."""
    others = [floored(strategy, least) for number, strategy in enumerate(strategies) if number != player]
    table = np.moveaxis(payoffs, player, 0)
    return table.reshape(len(table), -1), reduce(np.multiply.outer, others).ravel()


def fictitious_play(
    payoffs: Sequence[Array],
    beliefs: Sequence[Array],
    settings: RiskAversion,
    iterations: int,
    noise: Sequence[Array] | None = None,
) -> list[Array]:
    """Average strategies after simultaneous play; payoffs: one table per player, with an axis per player; noise: as `utility`'s,
    one per player with the player's own actions first."""
    average = [belief.astype(float) for belief in beliefs]
    within: Sequence[Array | None] = [None] * len(payoffs) if noise is None else noise
    for step in range(iterations):
        answers = [
            best_response(*against(table, average, player, settings.floor), settings, within[player])
            for player, table in enumerate(payoffs)
        ]
        rate = 1.0 / (step + settings.delay)
        average = [old + rate * (answer - old) for old, answer in zip(average, answers, strict=True)]
    return average


def exploitability(
    payoffs: Sequence[Array], strategies: Sequence[Array], settings: RiskAversion, noise: Sequence[Array] | None = None
) -> float:
    """Sum over players of what the best response has more utility than the player's strategy; 0 at an equilibrium. The entropy
    does not count. noise: as in `fictitious_play`. With a level, of what the strategy's mean lacks to it (or to the best one
    below it) and of its variance beyond the best response's."""
    plain, total = settings.model_copy(update={"entropy": 0.0}), 0.0
    for player, table in enumerate(payoffs):
        facing, within = against(table, strategies, player, settings.floor), None if noise is None else noise[player]
        best = best_response(*facing, plain, within)
        if settings.level is not None:
            total += _missed(strategies[player], best, *facing, settings.level)
            continue
        total += utility(best, *facing, plain, within) - utility(strategies[player], *facing, plain, within)
    return total


def _missed(own: Array, best: Array, payoffs: Array, strategy: Array, level: float) -> float:
    mean, covariance = moments(payoffs, strategy)
    lacking = max(min(level, float(mean.max())) - float(own @ mean), 0.0)
    return lacking + max(float(own @ covariance @ own - best @ covariance @ best), 0.0)


def selected(payoffs: Array, weights: Array, gamma: float, noise: Array | None = None) -> int:
    """Of candidates with payoffs [m, n] against a population of co-players with `weights` [n], the one of the highest mean minus
    gamma times the variance; ties: the first. noise: as in `utility`."""
    mean, covariance = moments(payoffs, weights)
    variance = np.diag(covariance) + (0.0 if noise is None else noise @ weights)
    return int((mean - gamma * variance).argmax())
