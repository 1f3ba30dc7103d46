"""Linear MDPs with finitely many states: exact values by backward induction, nominal, robust and under other dynamics.

The kernel is P_h(s'|s,a) = sum_i phi_i(s,a) mu_{h,i}(s'): features phi are probability vectors, and factors mu_{h,i} are
distributions over states; rewards are phi . theta_h. `simulated` is the five-state problem of Tang, Liu and Xu (arXiv
2411.18612).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Dual = Callable[[Array, Array], float]
"""(values [S], distribution [S]) -> the worst expectation of the values that the divergence allows."""


@dataclass(frozen=True)
class LinearMdp:
    features: Array
    """[S, A, d], entries >= 0, each vector of sum 1."""
    theta: Array
    """[H, d]."""
    factors: Array
    """[H, d, S]."""
    start: int
    fail: int | None = None
    """A state of value 0 that is never left."""
    most: float | None = None
    """The largest return of an episode; None: 1 in every step."""

    @property
    def largest_return(self) -> float:
        return self.horizon if self.most is None else self.most

    @property
    def horizon(self) -> int:
        return len(self.theta)

    def rewards(self, step: int) -> Array:
        """[S, A]."""
        return self.features @ self.theta[step]

    def kernel(self, step: int) -> Array:
        """[S, A, S]."""
        return self.features @ self.factors[step]


@dataclass(frozen=True)
class Steps:
    """K episodes step by step: states, actions and next states, each [K, H]."""

    states: NDArray[np.int64]
    actions: NDArray[np.int64]
    following: NDArray[np.int64]


def play(mdp: LinearMdp, episodes: int, rng: np.random.Generator) -> Steps:
    """Episodes of a player that acts at random."""
    shape = (episodes, mdp.horizon)
    states, actions, following = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    state = np.full(episodes, mdp.start)
    for step in range(mdp.horizon):
        action = rng.integers(mdp.features.shape[1], size=episodes)
        reached = mdp.kernel(step)[state, action].cumsum(-1)
        after = (rng.random((episodes, 1)) > reached).sum(-1).clip(max=len(mdp.features) - 1)
        states[:, step], actions[:, step], following[:, step] = state, action, after
        state = after
    return Steps(states, actions, following)


def policy_value(mdp: LinearMdp, policy: NDArray[np.int64]) -> float:
    """Expected return from the start of a deterministic policy [H, S]."""
    value, every = np.zeros(len(mdp.features)), np.arange(len(mdp.features))
    for step in reversed(range(mdp.horizon)):
        q = mdp.rewards(step) + mdp.kernel(step) @ value
        value = q[every, policy[step]]
    return float(value[mdp.start])


def robust_values(mdp: LinearMdp, dual: Dual, policy: NDArray[np.int64] | None = None) -> tuple[float, NDArray[np.int64]]:
    """(value from the start in the worst case of each factor, the policy [H, S]); `policy` None: the best one."""
    value, every = np.zeros(len(mdp.features)), np.arange(len(mdp.features))
    chosen = np.zeros((mdp.horizon, len(mdp.features)), dtype=np.int64)
    for step in reversed(range(mdp.horizon)):
        worst = np.array([dual(value, factor) for factor in mdp.factors[step]])
        q = mdp.rewards(step) + mdp.features @ worst
        chosen[step] = q.argmax(-1) if policy is None else policy[step]
        value = q[every, chosen[step]]
    return float(value[mdp.start]), chosen


def expectation(values: Array, weights: Array) -> float:
    """The dual of no robustness."""
    return float(weights @ values)


def simulated(delta: float = 0.3, strength: float = 0.2, slip: float = 0.001) -> LinearMdp:
    """The paper's simulated problem: x1 to x3 in a row, a failure x4, a goal x5; 16 actions; horizon 3.

    `strength`: the l1 norm of xi. A higher probability of the goal (delta + xi . a) costs nothing, unless the way there fails
    (`perturbed`).
    """
    actions = np.array(list(product((-1.0, 1.0), repeat=4)))
    leap = delta + actions @ np.full(4, strength / 4)
    features = np.zeros((5, len(actions), 4))
    for state in range(3):
        features[state, :, state], features[state, :, 3] = 1 - leap, leap
    features[3, :, 2] = features[4, :, 3] = 1.0
    theta = np.zeros((3, 4))
    theta[1:, 3] = 1.0
    factor = np.zeros((4, 5))
    factor[0, [1, 3]] = factor[1, [2, 3]] = 1 - slip, slip
    factor[2, 3] = factor[3, 4] = 1.0
    return LinearMdp(features, theta, np.stack([factor] * 3), start=0, fail=3)


def perturbed(mdp: LinearMdp, share: float) -> LinearMdp:
    """`simulated` where, in the first step, `share` of the ways to the goal lead to the failure."""
    factors = mdp.factors.copy()
    factors[0, 3, 3], factors[0, 3, 4] = share, 1 - share
    return replace(mdp, factors=factors)
