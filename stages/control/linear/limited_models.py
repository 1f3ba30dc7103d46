"""Models too small for the whole state: what their loss makes them learn, judged by the controller that is designed on them.

`python -m stages.control.linear.limited_models --settings FILE --result FILE` fits one model and evaluates its controller
exactly: a run of lane control with `environment: linear_control`. After Voelcker et al., arXiv 2204.01464: squared error spends
the model on large distractors, VaGraM on what the value depends on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stages.control.linear.quadratic import Array, LinearSystem, distracted
from stages.control.linear.settings import LinearModel
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.seeding import key64

RIDGE = 1e-8
"""Relative to the mean of the normal equations' diagonal: what the data do not determine is 0."""
WORST = 100.0
"""Cost ratios count at most this much: some controllers diverge."""


def transitions(system: LinearSystem, settings: LinearModel) -> tuple[Array, Array]:
    """Inputs [N, S + 1] (state and action) and next states [N, S]."""
    rng = np.random.default_rng(key64(settings.seed, "linear_control", "data"))
    unit = state_spread(settings)
    state = rng.normal(size=(settings.data, len(unit))) * unit
    action = rng.normal(size=(settings.data, 1))
    following = state @ system.a.T + action @ system.b.T
    return np.hstack([state, action]), following + settings.noise * rng.normal(size=following.shape)


def state_spread(settings: LinearModel) -> Array:
    """Standard deviations of the states [S]."""
    return np.concatenate([np.ones(2), np.full(settings.distractors, settings.amplitude)])


def value_gradients(system: LinearSystem, following: Array) -> Array:
    """Of the best controller's cost to go at next states [N, S]: [N, S]."""
    return 2.0 * following @ system.value()


def loss(kind: str, errors: Array, gradients: Array) -> float:
    """Mean over samples of the loss of errors [N, S]. kind: mse, vaml or vagram."""
    if kind == "mse":
        return float((errors**2).sum(1).mean())
    products = errors * gradients
    return float((products.sum(1) ** 2 if kind == "vaml" else (products**2).sum(1)).mean())


def fit(kind: str, inputs: Array, following: Array, gradients: Array, settings: LinearModel) -> tuple[Array, Array]:
    """Factors U [S, k] and V [k, S + 1] of the model s' = U V z, by alternating least squares from a random start."""
    rng = np.random.default_rng(key64(settings.seed, "linear_control", "model"))
    inner = rng.normal(size=(settings.rank, inputs.shape[1])) / np.sqrt(inputs.shape[1])
    for _ in range(settings.sweeps):
        outer = _outer(kind, inputs @ inner.T, following, gradients)
        inner = _inner(kind, outer, inputs, following, gradients)
    return outer, inner


def _outer(kind: str, hidden: Array, following: Array, gradients: Array) -> Array:
    """The best U [S, k] for hidden values [N, k]."""
    size, rank = following.shape[1], hidden.shape[1]
    if kind == "vaml":
        rows = (gradients[:, :, None] * hidden[:, None]).reshape(len(hidden), -1)
        return _least_squares(rows.T @ rows, rows.T @ (gradients * following).sum(1)).reshape(size, rank)
    weights = gradients**2 if kind == "vagram" else np.ones_like(following)
    normal = np.einsum("ns,nk,nl->skl", weights, hidden, hidden)
    right = np.einsum("ns,nk,ns->sk", weights, hidden, following)
    return np.stack([_least_squares(*one) for one in zip(normal, right, strict=True)])


def _inner(kind: str, outer: Array, inputs: Array, following: Array, gradients: Array) -> Array:
    """The best V [k, S + 1] for U [S, k]."""
    rank, width = outer.shape[1], inputs.shape[1]
    if kind == "vaml":
        rows = ((gradients @ outer)[:, :, None] * inputs[:, None]).reshape(len(inputs), -1)
        return _least_squares(rows.T @ rows, rows.T @ (gradients * following).sum(1)).reshape(rank, width)
    weights = gradients**2 if kind == "vagram" else np.ones_like(following)
    if kind == "mse":
        normal = np.kron(outer.T @ outer, inputs.T @ inputs)
    else:
        mixing = np.einsum("ns,sk,sl->nkl", weights, outer, outer)
        normal = np.einsum("nkl,ni,nj->kilj", mixing, inputs, inputs, optimize=True).reshape(rank * width, rank * width)
    right = ((weights * following) @ outer).T @ inputs
    return _least_squares(normal, right.ravel()).reshape(rank, width)


def _least_squares(normal: Array, right: Array) -> Array:
    scale = RIDGE * max(float(np.trace(normal)) / len(normal), 1e-300)
    return np.linalg.solve(normal + scale * np.eye(len(normal)), right)


def run(settings: LinearModel) -> dict[str, float]:
    """cost_ratio: cost of the controller that is best in the model, in the true system, relative to the best; log_cost_ratio: its
    logarithm; model_error: root mean squared error of the model per dimension, on new data; value_error: the same,
    weighted by the value's gradient; vaml_error, vaml_bound: root mean squared error of the value to first order, in which errors
    cancel, and the bound of it, which VaGraM lowers; loss: what was minimised."""
    system = distracted(settings.distractors, settings.gamma)
    inputs, following = transitions(system, settings)
    gradients = value_gradients(system, following)
    outer, inner = fit(settings.loss, inputs, following, gradients, settings)
    model = outer @ inner
    designed = replace(system, a=model[:, :-1], b=model[:, -1:])
    spread = np.diag(state_spread(settings) ** 2)
    best = system.cost(system.gain(system.value()), spread)
    ratio = min(system.cost(designed.gain(designed.value()), spread) / best, WORST)
    fresh, after = transitions(system, settings.model_copy(update={"seed": settings.seed + 2**31}))
    errors, weights = fresh @ model.T - after, value_gradients(system, after)
    return {
        "cost_ratio": ratio,
        "log_cost_ratio": float(np.log(ratio)),
        "model_error": float(np.sqrt((errors**2).mean())),
        "value_error": float(np.sqrt(((errors * weights) ** 2).mean())),
        "vaml_error": float(np.sqrt(loss("vaml", errors, weights))),
        "vaml_bound": float(np.sqrt(errors.shape[1] * loss("vagram", errors, weights))),
        "loss": loss(settings.loss, inputs @ model.T - following, gradients),
    }


@command
def main() -> int:
    return one_run("control", __doc__, LinearModel, run)


if __name__ == "__main__":
    raise SystemExit(main())
