"""OmegaPRM's search for the first error, and flat measurement of a solution's states."""

from __future__ import annotations

from contextlib import suppress

import pytest
from tabular import MODES, ROOT, grow

from stages.annotation.labels import first_error
from stages.annotation.requests import TurnRequest
from stages.annotation.settings import Annotate
from stages.annotation.solutions import omega
from stages.annotation.tree import Edge, Tree
from stages.claims.known_tree import DEPTH
from stages.seeding import key64


@pytest.mark.parametrize("error", [1, 2, 5, 8, 11, 15, 16])
def test_bisection_finds_the_first_error(error: int):
    """Contract: on 16 steps with k = 8, 32 rollouts (not 128) find step j if MC is 1 before it and 0 from it on."""
    tree = Tree("t", ROOT, Annotate(iterations=1, selection={"rule": "omega", "c": 0.125}, evaluation={"rollouts": 8}))
    plan = omega(tree)
    work = next(plan)
    assert work == [TurnRequest(0, number) for number in range(8)]

    def step(name: str, end: bool, reward: float = 0.0) -> Edge:
        return Edge(name, (key64(name) % 10**9,), (), "", () if end else (11,), reward, end, False, "")

    wrong = [step(f"w{depth}", depth == 16) for depth in range(1, 17)]
    results = [wrong, *([step(f"r{number}", True, 1.0)] for number in range(7))]
    measured = []
    with suppress(StopIteration):
        while True:
            work = plan.send(results)
            depth = tree.nodes[work[0].start].depth
            measured.append(depth)
            assert len(work) == 8
            results = [[step(f"{depth}-{play.number}", True, float(depth < error))] for play in work]
    assert 8 * len(measured) == 32
    assert tree.iterations == 1
    path = tree.path(16)
    # The measurements locate the error: MC 1 before it, 0 from it on.
    before = [depth for depth in measured if depth < error]
    from_error = [depth for depth in measured if depth >= error]
    assert max(before, default=0) == error - 1
    assert min(from_error, default=16) == error
    assert first_error(tree.rows(), 16) == (path[error] if error < 16 else 16)


def test_equal_rollouts_are_searched_once():
    """Contract: of four rollouts from the root three are the same failure, which is searched once."""
    tree = Tree("t", ROOT, Annotate(iterations=9, selection={"rule": "omega", "c": 0.125}, evaluation={"rollouts": 4}))
    plan = omega(tree)
    next(plan)

    def step(token: int, reward: float = 0.0, end: bool = True) -> Edge:
        return Edge(str(token), (token,), (), "", () if end else (11,), reward, end, False, "")

    (first,) = {play.start for play in plan.send([[step(1, end=False), step(2)]] * 3 + [[step(3, 1.0)]])}
    assert tree.path(first) == [0, first]
    with pytest.raises(StopIteration):
        plan.send([[step(number)] for number in range(4, 8)])
    assert tree.iterations == 1


def test_each_rollout_is_searched_at_most_once():
    """Contract: the pool holds failed rollouts of states with 0 < MC < 1; each is searched once, and a tree with an empty pool
    ends."""
    for tree in grow([f"t{number}" for number in range(6)], iterations=500, **MODES["omega"]):
        assert tree.iterations < 500
        measured = {node.index for node in tree.nodes if node.n_rollouts >= 4}
        assert 4 * max(1, len(measured)) >= tree.nodes[0].N
    certain = grow(["a"], kind="paid", iterations=3, **MODES["omega"])  # no return reaches 1, so MC is 0
    assert certain[0].iterations == 0
    assert certain[0].nodes[0].N == 4


def test_flat_measures_every_state_of_a_solution():
    """Contract: every state of a solution is measured by k rollouts, which give its MC."""
    settings = {"selection": {"rule": "flat"}, "evaluation": {"rollouts": 6}}
    for tree in grow(["a", "b"], iterations=1, **settings):
        assert tree.nodes[0].N == 1 + 6 * (DEPTH + 1)
        way = [node for node in tree.nodes if node.iteration == 1][: DEPTH + 1]
        assert all(node.n_rollouts >= 7 for node in way)
    (tree,) = grow(["a"], iterations=50, stop={"policy_tokens": 200}, **settings)
    assert 200 <= tree.counters["policy_tokens"] < 200 + 6 * 2 * (DEPTH + 1)
