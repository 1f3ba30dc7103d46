"""RAVL: value pessimism against the edge of reach, in a chain of states with a perfect model.

`python -m stages.control.reach.ravl --settings FILE --result FILE` learns once and evaluates the greedy policy exactly: a run of
lane control with `environment: reach`.

After Sims et al., arXiv 2402.12527: rollouts of k steps from a dataset's states contain states that occur only as the last
successor. Targets use their values, but no update ever corrects these. Here they keep the values that learning began with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.control.one_run import one_run
from stages.control.reach.settings import Reach
from stages.records.card import Card
from stages.runtime.command import command
from stages.seeding import key64

CARD = Card(
    slug="ravl",
    title="RAVL",
    paper="Sims et al., arXiv 2402.12527",
    equation="y = r + gamma max_a min_i Q_i'(s', a), on rollouts of a model that are not terminal at their end",
    assumptions="members of the ensemble differ where there are no data",
    reduces_to="critics 1, or rollouts long enough to have no edge: Q-learning on the model",
    tested_by="tests/control/reach/test_ravl.py",
    switch="critics: 10 of environment reach, or offline with dynamics, lane control; annotate.q_model.ensemble: {}",
)
Array = NDArray[np.float64]
PRECISION = 1e-9
"""Values are iterated until what is left to change is this share of it."""


@dataclass(frozen=True)
class Rollouts:
    """R rollouts of k steps: all arrays [R, k]."""

    state: NDArray[np.int64]
    action: NDArray[np.int64]
    """0: left, 1: right."""
    following: NDArray[np.int64]

    def trained(self, states: int) -> NDArray[np.bool_]:
        """[S, 2]: the pairs of state and action that are updated."""
        found = np.zeros((states, 2), dtype=bool)
        found[self.state, self.action] = True
        return found

    def edge(self, states: int) -> NDArray[np.bool_]:
        """[S]: states whose values targets use and no update corrects."""
        found = np.zeros(states, dtype=bool)
        found[self.following] = True
        return found & ~self.trained(states).any(1)


def moves(states: int) -> NDArray[np.int64]:
    """[S, 2]: where an action leads; the ends of the chain hold."""
    return (np.arange(states)[:, None] + np.array([-1, 1])).clip(0, states - 1)


def rewards(settings: Reach) -> Array:
    """[S, 2]."""
    return -settings.penalty * np.abs(moves(settings.states) - settings.goal)


def predicted(settings: Reach) -> NDArray[np.int64]:
    """[M, S, 2]: where each member of the models says that an action leads."""
    true, models = moves(settings.states), settings.models
    if models is None:
        return true[None]
    rng = np.random.default_rng(key64(settings.seed, "reach", "models"))
    shape = (models.members, settings.states, 2)
    guess = np.arange(settings.states)[:, None] + rng.integers(-1, 2, shape)
    known = (np.arange(settings.states) < settings.covered)[:, None] | (rng.random(shape) < models.generalises)
    return np.where(known, true, guess.clip(0, settings.states - 1))


def predicted_rewards(settings: Reach, table: NDArray[np.int64]) -> Array:
    """[S, 2]: means over the members' next states [M, S, 2], less the penalty of their disagreement."""
    uncertainty = settings.models.uncertainty if settings.models else 0.0
    return (-settings.penalty * np.abs(table - settings.goal)).mean(0) - uncertainty * table.std(0)


def roll_out(settings: Reach) -> Rollouts:
    """Rollouts of the models from the dataset's states, with random actions."""
    rng = np.random.default_rng(key64(settings.seed, "reach", "rollouts"))
    table, shape = predicted(settings), (settings.rollouts, settings.length)
    action = rng.integers(2, size=shape)
    visited = np.empty((settings.rollouts, settings.length + 1), dtype=np.int64)
    visited[:, 0] = rng.integers(settings.covered, size=settings.rollouts)
    member = rng.integers(len(table), size=shape)
    for step in range(settings.length):
        visited[:, step + 1] = table[member[:, step], visited[:, step], action[:, step]]
    return Rollouts(visited[:, :-1], action, visited[:, 1:])


def first_values(settings: Reach) -> Array:
    """[N, S, 2]: what the members of the ensemble begin with."""
    rng = np.random.default_rng(key64(settings.seed, "reach", "values"))
    return rng.normal(0.0, settings.spread, (settings.critics, settings.states, 2))


def combined(values: Array, aggregate: str) -> Array:
    """The ensemble's values [...] from its members' [N, ...]. min_of_2: of N members in rising order, the i-th (from 0) is the
    smaller one in N - 1 - i pairs."""
    if aggregate == "min_of_2":
        pairs = np.arange(len(values) - 1, -1, -1.0)
        return np.tensordot(pairs / pairs.sum(), np.sort(values, 0), 1)
    return values.min(0) if aggregate == "min" else values.mean(0)


def iterations(gamma: float) -> int:
    """Sweeps after which value iteration has converged to PRECISION."""
    return int(np.ceil(np.log(PRECISION) / np.log(gamma)))


def learn(settings: Reach, rollouts: Rollouts, values: Array) -> Array:
    """The ensemble's action values [S, 2] after learning on `rollouts`, from members' first `values` [N, S, 2]."""
    return combined(learn_members(settings, rollouts, values), settings.aggregate)


def learn_members(settings: Reach, rollouts: Rollouts, values: Array) -> Array:
    """Every member's action values [N, S, 2] after learning on `rollouts`, from first `values` [N, S, 2].

    All members are trained on the same targets, and a table fits them exactly: sweeps replace the trained entries."""
    table = predicted(settings)
    reward = predicted_rewards(settings, table)
    trained, edge = rollouts.trained(settings.states), rollouts.edge(settings.states)
    values, best = values.copy(), optimal_values(settings)
    for _ in range(iterations(settings.gamma)):
        ahead = combined(values, settings.aggregate).max(1)
        if settings.true_edge_values:
            ahead = np.where(edge, best, ahead)
        values[:, trained] = (reward + settings.gamma * ahead[table].mean(0))[trained]
    return values


def disagreement(values: Array, states: NDArray[np.bool_]) -> float:
    """Mean standard deviation over members of their values [N, S, 2] in the marked states [S]; 0 if there are none."""
    return float(values.std(0)[states].mean()) if states.any() else 0.0


def optimal_values(settings: Reach) -> Array:
    """True values [S] of the best policy."""
    table, reward, values = moves(settings.states), rewards(settings), np.zeros(settings.states)
    for _ in range(iterations(settings.gamma)):
        values = (reward + settings.gamma * values[table]).max(1)
    return values


def policy_values(settings: Reach, policy: NDArray[np.int64]) -> Array:
    """True values [S] of the actions [S]."""
    every = np.arange(settings.states)
    kernel = np.zeros((settings.states, settings.states))
    kernel[every, moves(settings.states)[every, policy]] = 1.0
    return np.linalg.solve(np.eye(settings.states) - settings.gamma * kernel, rewards(settings)[every, policy])


def leaves(settings: Reach, policy: NDArray[np.int64], rollouts: Rollouts) -> bool:
    """Whether the policy ever leaves the trained states when it begins at one of the dataset's."""
    trained = rollouts.trained(settings.states).any(1)
    state = np.arange(settings.covered)
    for _ in range(settings.states):
        state = moves(settings.states)[state, policy[state]]
        if not trained[state].all():
            return True
    return False


def run(settings: Reach) -> dict[str, float]:
    """Learn once. return: of the greedy policy from the dataset's states, exact; suboptimality: what the best policy gets more;
    overestimation: learnt value minus that return; leaves: 1 if the policy leaves the trained states; edge_targets: share of
    transitions whose target uses the value of a state that is never trained; disagreement_edge, disagreement_inner: mean standard
    deviation over the critics in such states, and in those of which both actions are trained."""
    rollouts = roll_out(settings)
    members = learn_members(settings, rollouts, first_values(settings))
    learnt = combined(members, settings.aggregate)
    policy, start = learnt.argmax(1), slice(0, settings.covered)
    achieved = policy_values(settings, policy)[start].mean()
    return {
        "return": float(achieved),
        "suboptimality": float(optimal_values(settings)[start].mean() - achieved),
        "overestimation": float(learnt.max(1)[start].mean() - achieved),
        "leaves": float(leaves(settings, policy, rollouts)),
        "edge_targets": float(rollouts.edge(settings.states)[rollouts.following].mean()),
        "disagreement_edge": disagreement(members, rollouts.edge(settings.states)),
        "disagreement_inner": disagreement(members, rollouts.trained(settings.states).all(1)),
    }


@command
def main() -> int:
    return one_run("control", __doc__, Reach, run)


if __name__ == "__main__":
    raise SystemExit(main())
