"""R2PVI: robust regularised pessimistic value iteration in linear MDPs, and the methods it is compared with.

`python -m stages.control.exact.r2pvi --settings FILE --result FILE` learns from episodes of the simulated problem once, and
evaluates the policy exactly under shifted dynamics: a run of lane control with `environment: linear_mdp`.

After Tang, Liu and Xu, arXiv 2411.18612: the expectation over the next value is replaced, factor by factor, by
inf over mu of E_mu[V] + weight * D(mu || mu_i), in its dual form, estimated by ridge regression on the features.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from stages.control.exact.linear_mdp import (
    Array,
    Dual,
    LinearMdp,
    Steps,
    expectation,
    perturbed,
    play,
    policy_value,
    robust_values,
    simulated,
)
from stages.control.exact.settings import PENALISED, LinearPvi
from stages.control.one_run import one_run
from stages.records.card import Card
from stages.runtime.command import command
from stages.seeding import key64

CARD = Card(
    slug="r2pvi",
    title="R2PVI",
    paper="Tang, Liu and Xu, arXiv 2411.18612",
    equation="Q_h = min(phi . (theta + nu) - b, H - h); nu_i = inf over mu of E_mu[V'] + w D(mu || mu_i), by its dual: TV "
    "E[min(V', min V' + w)]; KL -w log E[exp(-V'/w)]; chi2 max over a of E[min(V', a)] - Var[min(V', a)] / (4 w); "
    "expectations by ridge regression on phi; b = beta sqrt(sum_i phi_i^2 [L^-1]_ii)",
    assumptions="rewards and kernel linear in known features that are probability vectors; a finite horizon; known rewards",
    reduces_to="divergence_weight to infinity, penalty full: PEVI with known rewards",
    tested_by="tests/control/exact/test_r2pvi.py",
    switch="robust: tv, kl or chi2 of environment linear_mdp, lane control",
)
SHARES = tuple(number / 10 for number in range(11))
"""Shares of the first step's ways to the goal that fail."""
GRID = 200
"""Levels at which the chi2 dual and the TV constraint are maximised, beside the values."""


def dual(kind: str, weight: float) -> Dual:
    """The exact worst case under a divergence penalty: KIND -> its dual, of finite distributions. Raises KeyError."""

    def tv(values: Array, weights: Array) -> float:
        return float(weights @ np.minimum(values, values.min() + weight))

    def kl(values: Array, weights: Array) -> float:
        low = values.min()  # before the exponentials, which would underflow
        return float(low - weight * np.log(weights @ np.exp(-(values - low) / weight)))

    def chi2(values: Array, weights: Array) -> float:
        cut = np.minimum(values[:, None], _levels(values.min(), values.max(), values))
        mean = weights @ cut
        return float((mean - (weights @ cut**2 - mean**2) / (4 * weight)).max())

    return {"tv": tv, "kl": kl, "chi2": chi2, "none": expectation}[kind]


def _levels(low: float, high: float, values: Array) -> Array:
    """Where the maximum over a of the chi2 dual is looked for: a grid, and the values, between which it is smooth."""
    return np.unique(np.concatenate([np.linspace(low, high, GRID), values]))


class Regression:
    """Ridge regression on the features of one step's data."""

    def __init__(self, features: Array, ridge: float) -> None:
        """`features`: [K, d]."""
        self.features = features
        self.inverse = np.linalg.inv(features.T @ features + ridge * np.eye(features.shape[1]))

    def __call__(self, targets: Array) -> Array:
        """Coefficients [d, ...] of targets [K, ...]."""
        return self.inverse @ (self.features.T @ targets)


def worst_case(regression: Regression, values: Array, horizon: int, settings: LinearPvi) -> Array:
    """nu [d]: the estimated worst case of each factor, from the next values [K] of the data."""
    estimators: dict[str, Callable[[], Array]] = {
        "tv": lambda: regression(np.minimum(values, values.min() + settings.divergence_weight)),
        "kl": lambda: _kl(regression, values, horizon, settings),
        "chi2": lambda: _chi2(regression, values, horizon, settings),
        "tv_constrained": lambda: _tv_constrained(regression, values, horizon, settings.radius),
        "kl_constrained": lambda: _kl_constrained(regression, values, horizon, settings.radius),
    }
    return estimators[settings.robust]()


def _kl(regression: Regression, values: Array, horizon: int, settings: LinearPvi) -> Array:
    weight = settings.divergence_weight
    if settings.kl_regression == "shifted":
        found = 1 + regression(np.exp(-values / weight) - 1)
        return -weight * np.log(found.clip(np.exp(-horizon / weight), 1.0))
    low = values.min()
    # Clipped in the shifted scale: exp(-H / weight) itself underflows for small weights.
    found = np.maximum(regression(np.exp(-(values - low) / weight)), np.exp((low - horizon) / weight))
    return low - weight * np.log(np.maximum(found, np.finfo(float).tiny))


def _chi2(regression: Regression, values: Array, horizon: int, settings: LinearPvi) -> Array:
    cut = np.minimum(values[:, None], _levels(0.0, horizon, values))
    mean, square = regression(cut), regression(cut**2)
    objective = mean - (square - mean**2) / (4 * settings.divergence_weight)
    return objective.max(-1) if settings.chi2_direction == "max" else objective.min(-1)


def _tv_constrained(regression: Regression, values: Array, horizon: int, radius: float) -> Array:
    levels = _levels(0.0, horizon, values)
    return (regression(np.minimum(values[:, None], levels)) - radius * levels).max(-1)


def _kl_constrained(regression: Regression, values: Array, horizon: int, radius: float) -> Array:
    def objective(log_level: float, factor: int) -> float:
        level = float(np.exp(log_level))
        inside = 1 + regression(np.exp(-values / level) - 1)[factor]
        return level * float(np.log(np.clip(inside, np.exp(-horizon / level), 1.0))) + level * radius

    found = []
    for factor in range(regression.features.shape[1]):
        best = minimize_scalar(objective, bounds=(np.log(1e-2), np.log(10.0 * horizon)), args=(factor,), method="bounded")
        found.append(max(0.0, -float(best.fun)))
    return np.array(found)


def penalty(features: Array, inverse: Array, kind: str) -> Array:
    """The pessimism for beta 1, [...], of features [..., d] and the regression's inverse matrix [d, d]. Raises KeyError."""
    spread = np.diag(inverse)
    formulas: dict[str, Callable[[], Array]] = {
        "quadrature": lambda: np.sqrt((features**2 * spread).sum(-1)),
        "sum": lambda: (features * np.sqrt(spread)).sum(-1),
        "full": lambda: np.sqrt(np.einsum("...i,ij,...j->...", features, inverse, features)),
    }
    return formulas[kind]()


def learn(mdp: LinearMdp, data: Steps, settings: LinearPvi) -> tuple[NDArray[np.int64], Array]:
    """(greedy policy [H, S], penalties [H, S, A]) of the learned Q; only the data's transitions are read of `mdp`'s kernel."""
    horizon, states = mdp.horizon, len(mdp.features)
    policy, penalties = np.zeros((horizon, states), dtype=np.int64), np.zeros((horizon, *mdp.features.shape[:2]))
    value = np.zeros(states)
    for step in reversed(range(horizon)):
        rows = mdp.features[data.states[:, step], data.actions[:, step]]
        regression, following = Regression(rows, settings.ridge), value[data.following[:, step]]
        if settings.robust == "none":
            weights, kind = regression(rows @ mdp.theta[step] + following), "full"
        else:
            last = step == horizon - 1
            worst = 0.0 if last else worst_case(regression, following, horizon, settings)
            weights, kind = mdp.theta[step] + worst, settings.penalty
        penalties[step] = settings.beta * penalty(mdp.features, regression.inverse, kind)
        q = (mdp.features @ weights - penalties[step]).clip(0.0, horizon - step)
        policy[step], value = q.argmax(-1), q.max(-1)
        if mdp.fail is not None:
            value[mdp.fail] = 0.0
    return policy, penalties


def bound(mdp: LinearMdp, policy: NDArray[np.int64], penalties: Array) -> float:
    """Twice the largest sum of penalties that the policy can meet from the start: over all factors, so an upper bound of the
    paper's, whose supremum is over the worst cases."""
    value, every = np.zeros(len(mdp.features)), np.arange(len(mdp.features))
    for step in reversed(range(mdp.horizon)):
        value = penalties[step][every, policy[step]] + value.max()
    return 2 * float(value[mdp.start])


def run(settings: LinearPvi) -> dict[str, float]:
    """Of the learned policy: `return_<percent>` with that share of failing ways, and their mean; `suboptimality_<divergence>`,
    how far its worst case under a penalty of `divergence_weight` is below the best policy's, and the method's `bound` of it."""
    mdp = simulated(settings.delta, settings.strength)
    data = play(mdp, settings.episodes, np.random.default_rng(key64(settings.seed, "r2pvi", "episodes")))
    policy, penalties = learn(mdp, data, settings)
    found = {f"return_{round(100 * share)}": policy_value(perturbed(mdp, share), policy) for share in SHARES}
    found["return_mean"] = sum(found.values()) / len(found)
    for kind in PENALISED:
        worst = dual(kind, settings.divergence_weight)
        best, optimal = robust_values(mdp, worst)
        found[f"suboptimality_{kind}"] = best - robust_values(mdp, worst, policy)[0]
        if kind == settings.robust:
            found["bound"] = bound(mdp, optimal, penalties)
    return found


@command
def main() -> int:
    return one_run("control", __doc__, LinearPvi, run)


if __name__ == "__main__":
    raise SystemExit(main())
