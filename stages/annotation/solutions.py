"""Searches that start from whole solutions and measure the states on their way, without a tree policy.

A state is worth MC = the share of `evaluation.rollouts` rollouts from it that succeed.
flat   Math-Shepherd (2312.08935): an iteration is a rollout from the start, each of whose states is measured: M measurements
       for M steps.
omega  OmegaPRM (2406.06592): the pool holds the wrong rollouts of all states with 0 < MC < 1, equal ones once. An iteration takes
       the one of highest score (`selection.omega_score`) out of it, for good, and halves it: if MC of the state in the middle is
       above 0 the first error comes later, else it is there or before. So a rollout of M steps takes about log2 M measurements;
       every state that is measured on the way brings its own wrong rollouts into the pool.
In a node's counts the rollouts that passed it stand beside those that measured it. Budgets are checked between measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.annotation.selection import omega_score
from stages.annotation.tree import Tree
from stages.annotation.work import SearchPlan, TurnRequest, spent, stopped

if TYPE_CHECKING:
    from stages.annotation.tree import Edge


@dataclass(frozen=True)
class Wrong:
    """A wrong rollout from `state`; `path`: its nodes, the state first."""

    state: int
    path: tuple[int, ...]
    words: int


class _Pool:
    """Wrong rollouts to be searched, states' values and how often each was searched from."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.candidates: list[Wrong] = []
        self.mc: dict[int, float] = {}
        self.visits: dict[int, int] = {}
        self._entered: set[tuple[int, ...]] = set()

    def enter(self, state: int, results: list[list[Edge]]) -> float:
        """Enter a state's rollouts into tree and pool; its MC."""
        tree = self.tree
        ways = []
        for edges in results:
            last = tree.insert(state, edges, tree.iterations + 1)
            path = tree.path(last)[tree.nodes[state].depth :]
            ways.append(Wrong(state, tuple(path), sum(len(edge.action.split()) for edge in edges)))
        right = [tree.nodes[way.path[-1]].succeeded for way in ways]
        self.mc[state] = sum(right) / len(right)
        if 0.0 < self.mc[state] < 1.0:
            for way, good in zip(ways, right, strict=True):
                if not good and way.path not in self._entered:  # equal rollouts are one way, to be searched once
                    self._entered.add(way.path)
                    self.candidates.append(way)
        return self.mc[state]

    def take(self) -> Wrong:
        """The candidate of highest score, the first of equals, out of the pool."""
        selection, everywhere = self.tree.params.selection, sum(self.visits.values())
        ranked = [
            omega_score(*(self.mc[way.state], way.words, self.visits.get(way.state, 0), everywhere), selection.omega, selection.c)
            for way in self.candidates
        ]
        chosen = self.candidates.pop(ranked.index(max(ranked)))
        self.visits[chosen.state] = self.visits.get(chosen.state, 0) + 1
        return chosen


def _measure(pool: _Pool, state: int) -> SearchPlan:
    """Know a state's MC; those known already are not measured again."""
    if state in pool.mc:
        return
    first = pool.tree.nodes[state].n_rollouts
    results = yield [TurnRequest(state, first + number) for number in range(pool.tree.params.evaluation.rollouts)]
    pool.enter(state, results)


def omega(tree: Tree) -> SearchPlan:
    """The plan of a tree; it ends early where the pool is empty."""
    pool = _Pool(tree)
    if tree.nodes[0].ended:
        return
    yield from _measure(pool, 0)
    while pool.candidates and not stopped(tree):
        way = pool.take().path
        right, wrong = 0, len(way) - 1
        while wrong - right > 1 and not spent(tree):
            middle = (right + wrong) // 2
            yield from _measure(pool, way[middle])
            if pool.mc[way[middle]] > 0.0:
                right = middle
            else:
                wrong = middle
        tree.iterations += 1


def flat(tree: Tree) -> SearchPlan:
    """The plan of a tree."""
    pool = _Pool(tree)
    while not tree.nodes[0].ended and not stopped(tree):
        (edges,) = yield [TurnRequest(0, tree.nodes[0].n_rollouts)]
        last = tree.insert(0, edges, tree.iterations + 1)
        for state in tree.path(last)[:-1]:
            if not spent(tree):
                yield from _measure(pool, state)
        tree.iterations += 1
