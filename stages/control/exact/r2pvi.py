"""R2PVI: robust regularised pessimistic value iteration in linear MDPs, and the methods it is compared with.

`python -m stages.control.exact.r2pvi --settings FILE --result FILE` learns from episodes of the simulated problem once, and
evaluates the policy exactly under shifted dynamics: a run of lane control with `environment: linear_mdp`.

After Tang, Liu and Xu, arXiv 2411.18612: the expectation over the next value is replaced, factor by factor, by
inf over mu of E_mu[V] + weight * D(mu || mu_i), in its dual form, estimated by ridge regression on the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from stages.control.exact.frozen_lake import frozen_lake
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
"""Shares of the first step's ways to the goal that fail, or of actions that slip on the frozen lake."""
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

    def __init__(self, features: Array, ridge: float, weights: Array | None = None) -> None:
        """`features`: [K, d]; `weights`: of the rows, [K], or None if all are 1."""
        self.features = features
        self.weighted = features if weights is None else features * weights[:, None]
        self.inverse = np.linalg.inv(self.weighted.T @ features + ridge * np.eye(features.shape[1]))

    def __call__(self, targets: Array) -> Array:
        """Coefficients [d, ...] of targets [K, ...]."""
        return self.inverse @ (self.weighted.T @ targets)

    def variance(self, targets: Array) -> Array:
        """Of the targets [K], given the features, at every row, [K]: at least 0."""
        mean, square = (self.features @ self(one) for one in (targets, targets**2))
        return np.maximum(square - mean**2, 0.0)


def worst_case(regression: Regression, values: Array, most: float, settings: LinearPvi) -> Array:
    """nu [d]: the estimated worst case of each factor, from the next values [K] of the data. most: that a value can be."""
    estimators: dict[str, Callable[[], Array]] = {
        "tv": lambda: regression(np.minimum(values, values.min() + settings.divergence_weight)),
        "kl": lambda: _kl(regression, values, most, settings),
        "chi2": lambda: _chi2(regression, values, most, settings),
        "tv_constrained": lambda: _tv_constrained(regression, values, most, settings.radius),
        "kl_constrained": lambda: _kl_constrained(regression, values, most, settings.radius),
    }
    return estimators[settings.robust]()


def _kl(regression: Regression, values: Array, most: float, settings: LinearPvi) -> Array:
    weight = settings.divergence_weight
    if settings.kl_regression == "shifted":
        found = 1 + regression(np.exp(-values / weight) - 1)
        return -weight * np.log(found.clip(np.exp(-most / weight), 1.0))
    low = values.min()
    # Clipped in the shifted scale: exp(-most / weight) itself underflows for small weights.
    found = np.maximum(regression(np.exp(-(values - low) / weight)), np.exp((low - most) / weight))
    return low - weight * np.log(np.maximum(found, np.finfo(float).tiny))


def _chi2(regression: Regression, values: Array, most: float, settings: LinearPvi) -> Array:
    cut = np.minimum(values[:, None], _levels(0.0, most, values))
    mean, square = regression(cut), regression(cut**2)
    objective = mean - (square - mean**2) / (4 * settings.divergence_weight)
    return objective.max(-1) if settings.chi2_direction == "max" else objective.min(-1)


def _tv_constrained(regression: Regression, values: Array, most: float, radius: float) -> Array:
    levels = _levels(0.0, most, values)
    return (regression(np.minimum(values[:, None], levels)) - radius * levels).max(-1)


def _kl_constrained(regression: Regression, values: Array, most: float, radius: float) -> Array:
    def objective(log_level: float, factor: int) -> float:
        level = float(np.exp(log_level))
        inside = 1 + regression(np.exp(-values / level) - 1)[factor]
        return level * float(np.log(np.clip(inside, np.exp(-most / level), 1.0))) + level * radius

    found = []
    for factor in range(regression.features.shape[1]):
        best = minimize_scalar(objective, bounds=(np.log(1e-2), np.log(10.0 * most)), args=(factor,), method="bounded")
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


class Learned(NamedTuple):
    """What `learn` finds: Q_h = min(phi . weights - penalties, H - h), at least 0."""

    policy: NDArray[np.int64]
    """Greedy, [H, S]."""
    penalties: Array
    """[H, S, A]."""
    weights: Array
    """theta + nu, [H, d]."""
    values: Array
    """[H + 1, S]; 0 after the last step and in the fail state."""


def learn(mdp: LinearMdp, data: Steps, settings: LinearPvi) -> Learned:
    """Only the data's transitions are read of `mdp`'s kernel."""
    first = learn(mdp, data, settings.model_copy(update={"weighting": "none"})) if settings.weighting == "variance" else None
    horizon, states = mdp.horizon, len(mdp.features)
    policy, penalties = np.zeros((horizon, states), dtype=np.int64), np.zeros((horizon, *mdp.features.shape[:2]))
    found, values = np.zeros((horizon, mdp.features.shape[-1])), np.zeros((horizon + 1, states))
    for step in reversed(range(horizon)):
        rows = mdp.features[data.states[:, step], data.actions[:, step]]
        counts = None
        if first is not None:
            variance = Regression(rows, settings.ridge).variance(first.values[step + 1][data.following[:, step]])
            counts = 1.0 / np.maximum(settings.least_variance, variance)
        regression, following = Regression(rows, settings.ridge, counts), values[step + 1][data.following[:, step]]
        if settings.robust == "none":
            weights, kind = regression(rows @ mdp.theta[step] + following), "full"
        else:
            last = step == horizon - 1
            worst = 0.0 if last else worst_case(regression, following, mdp.largest_return, settings)
            weights, kind = mdp.theta[step] + worst, settings.penalty
        penalties[step] = settings.beta * penalty(mdp.features, regression.inverse, kind)
        q = (mdp.features @ weights - penalties[step]).clip(0.0, min(horizon - step, mdp.largest_return))
        found[step], policy[step], values[step] = weights, q.argmax(-1), q.max(-1)
        if mdp.fail is not None:
            values[step, mdp.fail] = 0.0
    return Learned(policy, penalties, found, values)


def bound(mdp: LinearMdp, policy: NDArray[np.int64], penalties: Array, robust: str) -> float:
    """At most how far the worst case of the learned policy is below that of `policy`, the best one [H, S], from the start, if no
    backup errs by more than its penalty b [H, S, A] (`excess`): D_0(start) with

        D_h(s) = min(2 b_h(s, policy) + sum_i phi_i sup over mu of E_mu[D_{h+1}], H - h),  D_H = 0.

    Errors within b make Q at most the true backup of V and at least that minus 2 b. So V is at most the learned policy's value,
    and V* - V at most 2 b plus the next V* - V under the worst case of V. This is the argument behind the paper's bounds, twice
    the penalties that the best policy meets under the worst admissible kernel, with a narrower supremum: over the states that a
    factor reaches, as KL and chi2 are infinite elsewhere. TV may be finite, but its worst case moves mass to the fail state alone
    if there is one, where V* - V is 0. `robust: none` has no worst case but the factor itself (PEVI).
    """
    difference, every = np.zeros(len(mdp.features)), np.arange(len(mdp.features))
    for step in reversed(range(mdp.horizon)):
        if robust == "none":
            following = mdp.factors[step] @ difference
        else:
            anywhere = robust == "tv" and mdp.fail is None
            following = np.where((mdp.factors[step] > 0) | anywhere, difference, 0.0).max(-1)
        chosen = policy[step]
        difference = 2 * penalties[step][every, chosen] + mdp.features[every, chosen] @ following
        difference = np.minimum(difference, mdp.horizon - step)
        if mdp.fail is not None:
            difference[mdp.fail] = 0.0
    return float(difference[mdp.start])


def excess(mdp: LinearMdp, learned: Learned, worst: Dual) -> float:
    """The largest error of a learned backup of a state that can be reached, less its penalty. Where it is above 0, `bound` is not
    guaranteed: beta is too small."""
    found = []
    for step, states in enumerate(_reached(mdp)):
        backup = mdp.theta[step] + np.array([worst(learned.values[step + 1], factor) for factor in mdp.factors[step]])
        errors = np.abs(mdp.features[states] @ (learned.weights[step] - backup))
        found.append(float((errors - learned.penalties[step][states]).max()))
    return max(found)


def _reached(mdp: LinearMdp) -> Iterator[NDArray[np.int64]]:
    """The states that each step can begin in, without the fail state."""
    states = np.array([mdp.start])
    for step in range(mdp.horizon):
        yield states
        following = np.flatnonzero(mdp.kernel(step)[states].max((0, 1)))
        states = following[following != mdp.fail] if mdp.fail is not None else following


def problem(settings: LinearPvi) -> tuple[LinearMdp, Callable[[float], LinearMdp]]:
    """What the episodes are played in, and the same under dynamics shifted by a share of SHARES."""
    if settings.world == "frozen_lake":
        return frozen_lake(settings.horizon, settings.slip), lambda share: frozen_lake(settings.horizon, share)
    nominal = simulated(settings.delta, settings.strength)
    return nominal, lambda share: perturbed(nominal, share)


def run(settings: LinearPvi) -> dict[str, float]:
    """Of the learned policy: `return_<percent>` with that share of failing ways, or of actions that slip, and their mean;
    `suboptimality_<divergence>`, how far its worst case under a penalty of `divergence_weight` is below the best policy's. Of a
    method that is not constrained, `suboptimality` is that under its own divergence, `bound` the method's bound of it, and
    `excess` says whether that holds."""
    mdp, shifted = problem(settings)
    data = play(mdp, settings.episodes, np.random.default_rng(key64(settings.seed, "r2pvi", "episodes")))
    learned = learn(mdp, data, settings)
    found = {f"return_{round(100 * share)}": policy_value(shifted(share), learned.policy) for share in SHARES}
    found["return_mean"] = sum(found.values()) / len(found)
    for kind in (*PENALISED, "none"):
        worst = dual(kind, settings.divergence_weight)
        best, optimal = robust_values(mdp, worst)
        lacking = best - robust_values(mdp, worst, learned.policy)[0]
        if kind in PENALISED:
            found[f"suboptimality_{kind}"] = lacking
        if kind == settings.robust:
            found["suboptimality"] = lacking
            found["bound"] = bound(mdp, optimal, learned.penalties, kind)
            found["excess"] = excess(mdp, learned, worst)
    return found


@command
def main() -> int:
    return one_run("control", __doc__, LinearPvi, run)


if __name__ == "__main__":
    raise SystemExit(main())
