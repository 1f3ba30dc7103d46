"""Tabular MDPs of a finite horizon: exact values by backward induction, and Q-learning, which is compared with them.

`python -m stages.control.exact.tabular --settings FILE --result FILE` learns once: a run of lane control with
`environment: tabular`. Q-learning after Watkins and Dayan (1992), with one table per step: a state's value depends on how many
steps are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.control.exact.settings import TabularQ
from stages.control.off_policy.vector_task import import_gymnasium
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.runtime.validation import ParamsError
from stages.seeding import key64

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TabularMdp:
    kernel: Array
    """[S, A, S]."""
    rewards: Array
    """[S, A]: expected."""
    start: Array
    """[S]: probabilities of the first state."""
    horizon: int
    gamma: float = 1.0


def of_gymnasium(task: str, horizon: int, gamma: float) -> TabularMdp:
    """The MDP of a toy-text task, which lists its transitions, and a state for the end, which gives nothing. Raises ParamsError
    for other tasks."""
    gymnasium = import_gymnasium()
    try:
        made = gymnasium.make(task).unwrapped
    except gymnasium.error.Error as error:
        raise ParamsError(f"task: Gymnasium has no {task}: {error}") from error
    if not hasattr(made, "P"):
        raise ParamsError(f"task: {task} does not list its transitions; backward induction needs them, as FrozenLake-v1 has")
    states, actions = int(made.observation_space.n), int(made.action_space.n)
    kernel, rewards = np.zeros((states + 1, actions, states + 1)), np.zeros((states + 1, actions))
    kernel[states, :, states] = 1.0
    for state, action in np.ndindex(states, actions):
        for chance, following, reward, over in made.P[state][action]:
            kernel[state, action, states if over else following] += chance
            rewards[state, action] += chance * reward
    start = np.append(np.asarray(made.initial_state_distrib, dtype=float), 0.0)
    return TabularMdp(kernel, rewards, start, horizon, gamma)


def backward_induction(mdp: TabularMdp, policy: NDArray[np.int64] | None = None) -> tuple[Array, Array]:
    """(Q [H, S, A], V [H + 1, S]) of a deterministic policy [H, S], or of the best one: Q_h = r + gamma P V_{h+1}, V_H = 0."""
    states, actions = mdp.rewards.shape
    q, value = np.zeros((mdp.horizon, states, actions)), np.zeros((mdp.horizon + 1, states))
    for step in reversed(range(mdp.horizon)):
        q[step] = mdp.rewards + mdp.gamma * mdp.kernel @ value[step + 1]
        chosen = q[step].argmax(1) if policy is None else policy[step]
        value[step] = q[step, np.arange(states), chosen]
    return q, value


def q_learning(mdp: TabularMdp, settings: TabularQ) -> tuple[Array, NDArray[np.int64]]:
    """(Q [H, S, A], visits [H, S, A]) after `episodes` episodes, played `batch` at a time. Visits of a pair in one batch move its
    value by their mean target, at the rate (1 + batches before)^-rate_power."""
    rng = np.random.default_rng(key64(settings.seed, "tabular", "episodes"))
    states, actions = mdp.rewards.shape
    shape = (mdp.horizon, states, actions)
    q, visits, batches = np.zeros(shape), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    cumulated = mdp.kernel.cumsum(-1)
    for _ in range(settings.episodes // settings.batch):
        state = rng.choice(states, size=settings.batch, p=mdp.start)
        for step in range(mdp.horizon):
            explores = rng.random(settings.batch) < settings.exploration
            action = np.where(explores, rng.integers(actions, size=settings.batch), q[step, state].argmax(1))
            after = (rng.random((settings.batch, 1)) > cumulated[state, action]).sum(-1).clip(max=states - 1)
            ahead = q[step + 1, after].max(1) if step + 1 < mdp.horizon else 0.0
            total, count = np.zeros((states, actions)), np.zeros((states, actions), dtype=np.int64)
            np.add.at(total, (state, action), mdp.rewards[state, action] + mdp.gamma * ahead)
            np.add.at(count, (state, action), 1)
            seen = count > 0
            rate = (1.0 + batches[step][seen]) ** -settings.rate_power
            q[step][seen] += rate * (total[seen] / count[seen] - q[step][seen])
            visits[step] += count
            batches[step] += seen
            state = after
    return q, visits


def run(settings: TabularQ) -> dict[str, float]:
    """Learn once. return: of the greedy policy, exact; suboptimality: what the best policy gets more; value_error: mean absolute
    error of Q over the state-action pairs of all steps, weighted by visits."""
    mdp = of_gymnasium(settings.task, settings.horizon, settings.gamma)
    learnt, visits = q_learning(mdp, settings)
    best, value = backward_induction(mdp)
    achieved = float(mdp.start @ backward_induction(mdp, learnt.argmax(-1))[1][0])
    return {
        "return": achieved,
        "suboptimality": float(mdp.start @ value[0]) - achieved,
        "value_error": float((visits * np.abs(learnt - best)).sum() / visits.sum()),
    }


@command
def main() -> int:
    return one_run("control", __doc__, TabularQ, run)


if __name__ == "__main__":
    raise SystemExit(main())
