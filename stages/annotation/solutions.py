"""Searches that sample whole solutions and measure the states along them, without a tree policy.

The value of a state is MC, the success rate of `evaluation.rollouts` rollouts from it.
flat   Math-Shepherd (2312.08935): an iteration is a rollout from the start, each of whose states is measured: M measurements
       for M steps.
omega  OmegaPRM (2406.06592): the pool holds the distinct failed rollouts of all states with 0 < MC < 1. An iteration removes the
       one of highest score (`selection.omega_score`) and bisects it: if MC of the middle state is above 0 the first error comes
       later, else it is there or before. So a rollout of M steps takes about log2 M measurements; every measured state adds its
       own failed rollouts to the pool.
A node's counts include the rollouts that pass it as well as those that measure it. Budgets are checked between measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.annotation.requests import SearchPlan, TurnRequest
from stages.annotation.selection import omega_score
from stages.annotation.stopping import spent, stopped
from stages.annotation.tree import Tree

if TYPE_CHECKING:
    from stages.annotation.tree import Edge


@dataclass(frozen=True)
class FailedRollout:
    """A failed rollout from `state`; `path`: its nodes, the state first."""

    state: int
    path: tuple[int, ...]
    words: int


class _Pool:
    """Failed rollouts to search, and each state's value and number of searches."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.candidates: list[FailedRollout] = []
        self.mc: dict[int, float] = {}
        self.visits: dict[int, int] = {}
        self._entered: set[tuple[int, ...]] = set()

    def enter(self, state: int, results: list[list[Edge]]) -> None:
        """Insert a state's rollouts into tree and pool."""
        tree = self.tree
        rollouts = []
        for edges in results:
            last = tree.insert(state, edges, tree.iterations + 1)
            path = tree.path(last)[tree.nodes[state].depth :]
            rollouts.append(FailedRollout(state, tuple(path), sum(len(edge.action.split()) for edge in edges)))
        succeeded = [tree.nodes[rollout.path[-1]].succeeded for rollout in rollouts]
        self.mc[state] = sum(succeeded) / len(succeeded)
        if 0.0 < self.mc[state] < 1.0:
            for rollout, success in zip(rollouts, succeeded, strict=True):
                if not success and rollout.path not in self._entered:
                    self._entered.add(rollout.path)
                    self.candidates.append(rollout)

    def pop_best(self) -> FailedRollout:
        """Remove and return the candidate of highest score, the first of ties."""
        selection, total = self.tree.params.selection, sum(self.visits.values())
        ranked = [
            omega_score(*(self.mc[one.state], one.words, self.visits.get(one.state, 0), total), selection.omega, selection.c)
            for one in self.candidates
        ]
        chosen = self.candidates.pop(ranked.index(max(ranked)))
        self.visits[chosen.state] = self.visits.get(chosen.state, 0) + 1
        return chosen


def _measure(pool: _Pool, state: int) -> SearchPlan:
    """Measure a state's MC, unless it is known."""
    if state in pool.mc:
        return
    first = pool.tree.nodes[state].n_rollouts
    results = yield [TurnRequest(state, first + number) for number in range(pool.tree.params.evaluation.rollouts)]
    pool.enter(state, results)


def omega(tree: Tree) -> SearchPlan:
    """OmegaPRM's plan of a tree; ends early if the pool is empty."""
    pool = _Pool(tree)
    if tree.nodes[0].ended:
        return
    yield from _measure(pool, 0)
    while pool.candidates and not stopped(tree):
        path = pool.pop_best().path
        right, wrong = 0, len(path) - 1
        while wrong - right > 1 and not spent(tree):
            middle = (right + wrong) // 2
            yield from _measure(pool, path[middle])
            if pool.mc[path[middle]] > 0.0:
                right = middle
            else:
                wrong = middle
        tree.iterations += 1


def flat(tree: Tree) -> SearchPlan:
    """Math-Shepherd's plan of a tree."""
    pool = _Pool(tree)
    while not tree.nodes[0].ended and not stopped(tree):
        (edges,) = yield [TurnRequest(0, tree.nodes[0].n_rollouts)]
        last = tree.insert(0, edges, tree.iterations + 1)
        for state in tree.path(last)[:-1]:
            if not spent(tree):
                yield from _measure(pool, state)
        tree.iterations += 1
