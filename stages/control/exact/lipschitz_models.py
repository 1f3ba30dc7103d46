"""Value iteration in learnt models: how far off values are, and how much of that a bound on their slope explains and repairs.

`python -m stages.control.exact.lipschitz_models --settings FILE --result FILE` learns once: a run of lane control with
`environment: lipschitz_model`. A walk on a line has a known kernel; models are learnt from a few transitions of each state and
action. After Asadi et al., arXiv 1804.07193 (generalised value iteration: any non-expansion f in place of the maximum), and Zheng
et al., arXiv 2302.01244 (limited slopes in place of ensembles):

|T V - T' V| <= gamma K(V) W, |V - V'| <= gamma min(K(V), K(V')) W / (1 - gamma), K(V) <= K(R) / (1 - gamma K(T)),

where W is the largest Wasserstein distance between the kernels T and T', and K the Lipschitz constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.control.exact.settings import LipschitzModel
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.seeding import key64

Array = NDArray[np.float64]
ACTIONS = np.array([-1.0, 0.0, 1.0])
PRECISION = 1e-9
"""Values are iterated until a sweep changes them by less."""
MOST_SWEEPS = 2000


@dataclass(frozen=True)
class World:
    place: Array
    """[S]."""
    kernel: Array
    """[S, A, S]."""
    reward: Array
    """[S, A]."""


def world(settings: LipschitzModel) -> World:
    """Where an action leads is a Gaussian, cut off at both ends of the line, on the grid of states."""
    place = np.linspace(0.0, 1.0, settings.states)
    middle = (place[:, None] + settings.move * ACTIONS).clip(0.0, 1.0)
    weight = np.exp(-0.5 * ((place - middle[..., None]) / settings.noise) ** 2)
    cost = settings.cost * np.abs(ACTIONS)
    reward = -np.abs(place - settings.goal)[:, None] - cost
    return World(place, weight / weight.sum(-1, keepdims=True), reward)


def learnt_kernel(settings: LipschitzModel, true: World) -> Array:
    """[S, A, S]: the mean of the members' kernels, each learnt from a bootstrap of the same samples (of all of them, if there is
    one member)."""
    rng = np.random.default_rng(key64(settings.seed, "lipschitz_model", "samples"))
    cumulated = true.kernel.cumsum(-1)
    draws = rng.random((*true.reward.shape, settings.samples))
    drawn = (draws[..., None] >= cumulated[..., None, :]).sum(-1).clip(max=settings.states - 1)
    total = np.zeros_like(true.kernel)
    for _ in range(settings.members):
        again = rng.integers(settings.samples, size=drawn.shape)
        own = drawn if settings.members == 1 else np.take_along_axis(drawn, again, -1)
        total += of_samples(own, settings)
    return total / settings.members


def of_samples(drawn: NDArray[np.int64], settings: LipschitzModel) -> Array:
    """The kernel [S, A, S] of a model of samples [S, A, N]."""
    every = np.arange(settings.states)
    if settings.model == "deterministic":
        middle = np.rint(drawn.mean(-1))
        return (middle[..., None] == every).astype(float)
    return (drawn[..., None] == every).mean(-2)


def wasserstein(one: Array, other: Array, width: float) -> Array:
    """W1 [...] between distributions [..., S] over places `width` apart: the area between their distribution functions."""
    return width * np.abs(one.cumsum(-1) - other.cumsum(-1))[..., :-1].sum(-1)


def lipschitz(values: Array, place: Array) -> float:
    """Largest slope of values [S, ...] over ascending places [S]."""
    gaps = np.diff(place)
    return float((np.abs(np.diff(values, axis=0)) / gaps.reshape(-1, *[1] * (values.ndim - 1))).max())


def kernel_constant(kernel: Array, place: Array) -> float:
    """K(T): largest W1 of next states per distance of two states, under the same action. Neighbours suffice on a line."""
    width = float(place[1] - place[0])
    return float((wasserstein(kernel[1:], kernel[:-1], width) / width).max())


def limited(values: Array, place: Array, slope: float | None) -> Array:
    """Halfway between the largest function of at most that slope below `values` [S] and the smallest above: of that slope, and
    a non-expansion."""
    if slope is None:
        return values
    change = slope * np.abs(place[:, None] - place)
    return 0.5 * ((values + change).min(1) + (values - change).max(1))


def operate(settings: LipschitzModel, values: Array) -> Array:
    """f(Q) [S] of action values [S, A]."""
    if settings.operator == "max":
        return values.max(1)
    if settings.operator == "mean":
        return values.mean(1)
    scaled = values / settings.temperature
    top = scaled.max(1, keepdims=True)
    weight = np.exp(scaled - top)
    if settings.operator == "mellowmax":
        return settings.temperature * (top[:, 0] + np.log(weight.mean(1)))
    return (weight * values).sum(1) / weight.sum(1)


def iterate(settings: LipschitzModel, at: World, kernel: Array, slope: float | None) -> tuple[Array, Array, int]:
    """Generalised value iteration from 0: (Q [S, A], V [S], sweeps); sweeps is MOST_SWEEPS if it does not converge."""
    values = np.zeros(len(at.place))
    for sweep in range(1, MOST_SWEEPS + 1):
        actions = at.reward + settings.gamma * kernel @ values
        after = limited(operate(settings, actions), at.place, slope)
        if np.abs(after - values).max() < PRECISION:
            return actions, after, sweep
        values = after
    return actions, values, MOST_SWEEPS


def policy_value(settings: LipschitzModel, at: World, policy: NDArray[np.int64]) -> Array:
    """True values [S] of the actions [S]."""
    every = np.arange(len(at.place))
    return np.linalg.solve(np.eye(len(at.place)) - settings.gamma * at.kernel[every, policy], at.reward[every, policy])


def run(settings: LipschitzModel) -> dict[str, float]:
    """Learn once. wasserstein: W, the model's largest error; value_error, bound: largest error of its values, and the bound of it
    (for values without a limited slope); bellman_gap, gap_bound: the same of one backup of its values; slope, true_slope,
    slope_bound: K of the model's values, of the true ones, and K(R) / (1 - gamma K(T)); suboptimality: mean over states of what
    the model's greedy policy lacks, exactly; sweeps: until value iteration converged."""
    at = world(settings)
    kernel, width = learnt_kernel(settings, at), float(at.place[1] - at.place[0])
    _, true, _ = iterate(settings, at, at.kernel, None)
    actions, values, sweeps = iterate(settings, at, kernel, settings.slope)
    best = iterate(settings.model_copy(update={"operator": "max"}), at, at.kernel, None)[1]
    error = wasserstein(kernel, at.kernel, width)
    most, gamma = float(error.max()), settings.gamma
    slopes = lipschitz(values, at.place), lipschitz(true, at.place)
    return {
        "wasserstein": most,
        "value_error": float(np.abs(values - true).max()),
        "bound": gamma * min(slopes) * most / (1.0 - gamma),
        "bellman_gap": gamma * float(np.abs((kernel - at.kernel) @ values).max()),
        "gap_bound": gamma * slopes[0] * most,
        "slope": slopes[0],
        "true_slope": slopes[1],
        "slope_bound": lipschitz(at.reward, at.place) / (1.0 - gamma * min(kernel_constant(at.kernel, at.place), 1.0)),
        "suboptimality": float((best - policy_value(settings, at, actions.argmax(1))).mean()),
        "sweeps": float(sweeps),
    }


@command
def main() -> int:
    return one_run("control", __doc__, LipschitzModel, run)


if __name__ == "__main__":
    raise SystemExit(main())
