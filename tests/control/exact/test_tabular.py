"""Backward induction by hand and against episodes; Q-learning converges to it."""

from __future__ import annotations

import numpy as np
import pytest

from stages.control.exact.settings import TabularQ
from stages.control.exact.tabular import TabularMdp, backward_induction, of_gymnasium, q_learning, run
from stages.runtime.validation import ParamsError


def two_states() -> TabularMdp:
    """Staying in state 0 pays 1; leaving for state 1 pays nothing, and there every step pays 2."""
    kernel = np.zeros((2, 2, 2))
    kernel[0, 0, 0] = kernel[0, 1, 1] = kernel[1, :, 1] = 1.0
    return TabularMdp(kernel, np.array([[1.0, 0.0], [2.0, 2.0]]), np.array([1.0, 0.0]), 3)


def test_backward_induction_by_hand() -> None:
    """With three steps left, leaving (0 + 2 + 2) beats staying (at best 1 + 2); with two, both give 2; with one, stay."""
    q, value = backward_induction(two_states())
    assert value[:, 0].tolist() == [4.0, 2.0, 1.0, 0.0]
    assert q[:, 0].tolist() == [[3.0, 4.0], [2.0, 2.0], [1.0, 0.0]]
    stay = backward_induction(two_states(), np.zeros((3, 2), dtype=np.int64))[1]
    assert stay[0, 0] == 3.0


def test_values_of_frozen_lake_are_its_episodes_returns() -> None:
    """A fixed policy's exact value against the mean return of Gymnasium's own episodes."""
    gymnasium = pytest.importorskip("gymnasium")
    mdp = of_gymnasium("FrozenLake-v1", 20, 1.0)
    policy = backward_induction(mdp)[0].argmax(-1)
    exact = float(mdp.start @ backward_induction(mdp, policy)[1][0])
    task, won = gymnasium.make("FrozenLake-v1", max_episode_steps=20), []
    for episode in range(400):
        state, over, step, total = task.reset(seed=episode)[0], False, 0, 0.0
        while not over:
            state, reward, terminated, truncated, _ = task.step(int(policy[step, state]))
            total, over, step = total + float(reward), terminated or truncated, step + 1
        won.append(total)
    error = np.std(won) / np.sqrt(len(won))
    assert 0.05 < exact < 0.6
    assert abs(np.mean(won) - exact) < 4 * error


def test_q_learning_converges_to_backward_induction() -> None:
    settings = TabularQ(episodes=4000, batch=10, exploration=1.0, rate_power=1.0)
    learnt, visits = q_learning(two_states(), settings)
    assert visits.sum() == 4000 * 3
    assert np.allclose(learnt[0, 0], [3.0, 4.0], atol=0.1)
    assert np.allclose(learnt[2, 1], 2.0)


def test_a_run_measures_what_is_missing() -> None:
    few, many = (run(TabularQ(horizon=12, episodes=episodes)) for episodes in (40, 4000))
    assert many["suboptimality"] < few["suboptimality"]
    assert many["value_error"] < few["value_error"]
    assert 0.0 <= many["suboptimality"] < 0.05


@pytest.mark.parametrize(
    ("task", "message"), [("CartPole-v1", "does not list its transitions"), ("FrozenLak-v1", "Gymnasium has no FrozenLak-v1")]
)
def test_other_tasks_are_refused(task: str, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        of_gymnasium(task, 5, 1.0)
