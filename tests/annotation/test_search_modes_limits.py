"""Several leaves of a tree at once, and its limits: budgets, success, values and depth."""

from __future__ import annotations

import pytest
from tabular import MODEL, ROOT, actions_of, grow

from stages.annotation.plans import lazy
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree
from stages.claims.known_tree import ARMS, DEPTH, Chat, FakeEngine, Pool, World, task, value
from stages.environments.protocol import Observation, Step

# ---- several leaves at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", ["wu_uct", "loss"])
def test_pending_visits_are_reverted_exactly(virtual: str):
    """Contract: with four leaves at once, counts and values are those of the rollouts inserted one by one."""
    (tree,) = grow(["a"], iterations=40, expand_k=3, leaves_per_tree=4, virtual=virtual)
    again = Tree("a", tree.nodes[0].edge, tree.params)
    for node in sorted((node for node in tree.nodes if node.ended), key=lambda node: node.iteration):
        edges = [tree.nodes[index].edge for index in tree.path(node.index)[1:]]
        for _ in range(node.N):
            again.insert(0, edges, node.iteration)
    assert {node.path: (node.N, node.W) for node in again.nodes} == {node.path: (node.N, node.W) for node in tree.nodes}
    assert tree.nodes[0].N == 40
    assert all(node.pending == 0 for node in tree.nodes)


def test_iterations_count_leaves_for_any_batch_size():
    """Contract: iterations count leaves, however many are evaluated at once; the last batch is no larger than what remains."""
    for leaves in (1, 3, 7):
        (tree,) = grow(["a"], iterations=20, expand_k=3, leaves_per_tree=leaves)
        assert tree.iterations == tree.nodes[0].N == 20


def test_pending_leaf_diverts_the_next_descent():
    """Contract: with equal statistics a second descent avoids the pending leaf."""
    for rule in ("wu_uct", "loss"):
        tree = Tree("t", ROOT, Annotate(expand_k=2, virtual=rule, leaves_per_tree=2))
        for token, outcome in enumerate([0.6, 0.5]):
            edges = [
                Edge(str(token), (token,), (), "", (11,), 0.0, False, False, ""),
                Edge("end", (9,), (), "", (), outcome, True, False, ""),
            ]
            tree.insert(0, edges, token + 1)
        plan = lazy(tree)
        first = tree.descend()
        tree.pend(first, 3)
        assert tree.descend(1) != first
        plan.close()


# ---- limits -----------------------------------------------------------------------------------------------------------------


def test_budget_ends_a_tree_between_iterations():
    """Contract: a tree stops with the iteration that reaches its budget of environment steps or tokens."""
    for name, counter in (("environment_steps", "environment_steps"), ("policy_tokens", "policy_tokens")):
        (tree,) = grow(["a"], iterations=500, expand_k=3, stop={name: 40})
        overshoot = 2 * (DEPTH + 1) if name == "policy_tokens" else 2 * DEPTH + 1
        assert 40 <= tree.counters[counter] < 40 + overshoot
        assert tree.nodes[0].N == tree.iterations < 500


def test_extra_iterations_follow_the_first_success():
    for tree in grow([f"t{n}" for n in range(8)], iterations=64, expand_k=3, stop={"on_success": True, "extra_after_success": 5}):
        first = tree.first_success
        assert tree.iterations == (64 if first is None else min(64, first + 5))


def test_stop_value_ends_a_tree():
    """Contract: a tree ends once the model's value of a history reaches stop.value, with or without success."""
    best = max(value(2, (a, b)) for a in range(3) for b in range(3))
    (tree,) = grow(["a"], world=2, iterations=400, expand_k=6, stop={"value": best - 1e-9}, **MODEL)
    assert max(node.model_value or 0.0 for node in tree.nodes) >= best - 1e-9
    assert tree.iterations < 400


def test_depth_one_is_a_bandit():
    """Contract: at max_depth 1 the tree is the root and its arms, and the best arm gets most visits."""

    class Bandit(World):
        def step(self, action: str):
            step = super().step(action)
            return type(step)(step.observation, [0.1, 0.9, 0.3][int(action)], True, True, False)

    class BanditPool(Pool):
        def take(self) -> World:
            return self.free.pop() if self.free else Bandit()

    params = Annotate(iterations=300, expand_k=12, max_depth=1, selection={"c": 0.3})
    (tree,) = Search(FakeEngine(), Chat(), BanditPool(), params, 5, 10_000).grow([task("a")])
    arms = {actions_of(tree, index)[0]: tree.nodes[index] for index in tree.nodes[0].children}
    assert len(tree.nodes) == 1 + ARMS
    assert [arms[arm].value for arm in range(ARMS)] == pytest.approx([0.1, 0.9, 0.3])
    assert arms[1].N > 200


def test_by_default_a_tree_is_as_deep_as_an_episode():
    """Contract: long episodes are played to their end, so that the tree's values are theirs."""

    class Long(World):
        def step(self, action: str) -> Step:
            self.actions = (*self.actions, int(action))
            won = len(self.actions) == 15
            return Step(Observation("at"), float(won), True, won, False)

    class LongPool(Pool):
        def take(self) -> World:
            return self.free.pop() if self.free else Long()

    (tree,) = Search(FakeEngine(), Chat(), LongPool(), Annotate(iterations=5), 5, 10_000).grow([task("a")])
    assert {(node.depth, node.edge.terminal, node.total) for node in tree.nodes if node.ended} == {(15, True, 1.0)}
