"""R2PVI with a weight that makes robustness worthless: what is learnt is PEVI's."""

from __future__ import annotations

import numpy as np
import pytest

from stages.control.exact.linear_mdp import LinearMdp, Steps, play, simulated
from stages.control.exact.r2pvi import learn
from stages.control.exact.settings import LinearPvi

HEAVY = {"tv": 3.0, "kl": 1e7}
"""Weights at which no other distribution is worth its penalty: for TV from the horizon on, for KL in the limit."""


def heavy(kind: str, ridge: float) -> LinearPvi:
    shifted = {"kl_regression": "shifted"} if kind == "kl" else {}
    values = {"robust": kind, "divergence_weight": HEAVY[kind], "penalty": "full", "ridge": ridge, **shifted}
    return LinearPvi.model_validate(values)


def pevi(mdp: LinearMdp, data: Steps, ridge: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pessimistic value iteration with known rewards, written out: policy [H, S], bonuses [H, S, A] and values [H + 1, S]."""
    states, actions, size = mdp.features.shape
    policy, bonus = np.zeros((3, states), dtype=int), np.zeros((3, states, actions))
    values = np.zeros((4, states))
    for step in (2, 1, 0):
        covariance, moment = ridge * np.eye(size), np.zeros(size)
        for state, action, after in zip(data.states[:, step], data.actions[:, step], data.following[:, step], strict=True):
            phi = mdp.features[state, action]
            covariance += np.outer(phi, phi)
            moment += phi * values[step + 1, after]
        inverse = np.linalg.inv(covariance)
        for state in range(states):
            phi = mdp.features[state]
            bonus[step, state] = [np.sqrt(one @ inverse @ one) for one in phi]
            q = np.clip(phi @ mdp.theta[step] + phi @ inverse @ moment - bonus[step, state], 0.0, 3 - step)
            policy[step, state], values[step, state] = q.argmax(), q.max()
        values[step, mdp.fail] = 0.0
    return policy, bonus, values


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("seed", range(3))
def test_heavy_penalties_learn_what_pevi_does_with_known_rewards(kind: str, seed: int) -> None:
    mdp = simulated()
    data = play(mdp, 100, np.random.default_rng(seed))
    policy, bonus, values = pevi(mdp, data, 0.1)
    learned = learn(mdp, data, heavy(kind, 0.1))
    assert learned.penalties == pytest.approx(bonus, abs=1e-9)
    assert learned.values == pytest.approx(values, abs=1e-6)
    assert (learned.policy == policy).all()


def test_pevi_regresses_rewards_which_a_small_ridge_leaves_as_they_are() -> None:
    """`robust: none` fits rewards, too. Where the data have every feature, a small ridge gives them back, and both are one."""
    features = np.stack([np.eye(2), np.array([[0.5, 0.5], [0.2, 0.8]]), np.array([[0.9, 0.1], [0.3, 0.7]])])
    factors = np.tile(np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]), (2, 1, 1))
    mdp = LinearMdp(features, np.array([[0.1, 0.6], [0.8, 0.3]]), factors, start=0)
    data = play(mdp, 300, np.random.default_rng(4))
    plain = learn(mdp, data, LinearPvi(robust="none", ridge=1e-9))
    robust = learn(mdp, data, heavy("tv", 1e-9))
    assert robust.penalties == pytest.approx(plain.penalties, abs=1e-9)
    assert robust.values == pytest.approx(plain.values, abs=1e-6)
    assert (robust.policy == plain.policy).all()
    assert plain.values[0].min() > 0.1
