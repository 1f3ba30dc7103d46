"""Search plans: generators that grow one tree by requesting policy turns and values, independent of engines, environments and
other trees.

lazy   descend to the first node whose next action was drawn fewer than `expand_k` times; roll out the policy from there. Every
       rollout is a draw at all nodes on its path, so expansion and evaluation are one.
eager  descend to a leaf; draw `expand_k` actions there at once; evaluate the leaf by a rollout from one of its children (LATS,
       rStar), by the value model (ReST-MCTS*), or by both. The model's value and the draws come from the same forward pass.
flat, omega  stages/annotation/solutions.py

With `leaves_per_tree` above 1, leaves are chosen one after the other, with visits in progress to the earlier ones; all are
evaluated together, then inserted in the order of choice, so the tree does not depend on which finishes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.annotation.derived import evaluates_children, uses_value_model
from stages.annotation.requests import SearchPlan, TurnRequest, ValueRequest
from stages.annotation.solutions import flat, omega
from stages.annotation.stopping import stopped
from stages.annotation.tree import Tree

if TYPE_CHECKING:
    from stages.annotation.tree import Edge


def search_plan(tree: Tree) -> SearchPlan:
    """The plan for the tree's settings."""
    if tree.params.selection.rule in ("flat", "omega"):
        return flat(tree) if tree.params.selection.rule == "flat" else omega(tree)
    return eager(tree) if tree.params.expansion.kind == "eager" else lazy(tree)


@dataclass
class _Leaf:
    """A chosen leaf. `first`: index of its first rollout; `start`: where its rollouts begin."""

    index: int
    first: int
    start: int
    rollouts: list[TurnRequest]
    results: list[list[Edge]]


def _choose(tree: Tree, distinct: bool) -> list[_Leaf]:
    """The leaves to evaluate together, marked as pending; `distinct`: no leaf twice."""
    params = tree.params
    visits = params.evaluation.rollouts
    leaves: list[_Leaf] = []
    for number in range(min(params.leaves_per_tree, params.iterations - tree.iterations)):
        index = tree.descend(number)
        node = tree.nodes[index]
        if distinct and any(leaf.index == index for leaf in leaves):
            break
        leaves.append(_Leaf(index, node.n_rollouts + node.pending, index, [], []))
        tree.pend(index, visits)
    return leaves


def _rollouts(tree: Tree, leaves: list[_Leaf]) -> SearchPlan:
    """Roll out from all leaves whose start is not an end."""
    for leaf in leaves:
        if not tree.nodes[leaf.start].ended:
            leaf.rollouts = [TurnRequest(leaf.start, leaf.first + number) for number in range(tree.params.evaluation.rollouts)]
    requests = [rollout for leaf in leaves for rollout in leaf.rollouts]
    if requests:
        results = iter((yield requests))
        for leaf in leaves:
            leaf.results = [next(results) for _ in leaf.rollouts]


def _finish_iteration(tree: Tree, leaf: _Leaf, model_value: float | None) -> None:
    """Insert a leaf's rollouts in order; a known end gets as many visits."""
    tree.pend(leaf.index, -tree.params.evaluation.rollouts)
    tree.iterations += 1
    if not leaf.rollouts:
        tree.counters["known_ends"] += 1
    for edges in leaf.results or [[]] * tree.params.evaluation.rollouts:
        tree.insert(leaf.start, edges, tree.iterations, model_value if leaf.rollouts else None)


def lazy(tree: Tree) -> SearchPlan:
    mixed = tree.params.evaluation.kind == "mixed"
    while not stopped(tree):
        leaves = _choose(tree, distinct=False)
        if mixed:
            yield from _evaluate(tree, [leaf.index for leaf in leaves])
        yield from _rollouts(tree, leaves)
        for leaf in leaves:
            _finish_iteration(tree, leaf, tree.nodes[leaf.index].model_value if mixed else None)


def eager(tree: Tree) -> SearchPlan:
    params = tree.params
    evaluation = params.evaluation
    while not stopped(tree):
        leaves = _choose(tree, distinct=True)
        open_leaves = [leaf.index for leaf in leaves if not tree.nodes[leaf.index].ended]
        if uses_value_model(evaluation):
            yield from _evaluate(tree, open_leaves)
        if evaluation.lookahead:
            yield from _look_ahead(tree, open_leaves)
        yield from _expand(tree, [index for index in open_leaves if not tree.nodes[index].drawn])
        if evaluation.kind != "value_model":
            for leaf in leaves:
                leaf.start = _start(tree, leaf.index)
                leaf.first = tree.nodes[leaf.start].n_rollouts
            yield from _rollouts(tree, leaves)
        for leaf in leaves:
            node = tree.nodes[leaf.index]
            if evaluation.kind != "value_model" or node.ended:
                _finish_iteration(tree, leaf, node.model_value if evaluation.kind == "mixed" else None)
                continue
            tree.pend(leaf.index, -1)
            tree.iterations += 1
            assert node.model_value is not None
            tree.back_up(leaf.index, node.model_value)


def _start(tree: Tree, index: int) -> int:
    """Where a leaf's rollouts begin: at the child that selection prefers, or at the leaf if it has none."""
    node = tree.nodes[index]
    children = [tree.nodes[child] for child in node.children]
    candidates = [child for child in children if not child.exhausted] or children
    return tree.choose(node, candidates).index if candidates else index


def _evaluate(tree: Tree, nodes: list[int]) -> SearchPlan:
    """Have the value model evaluate the nodes that are not ends and have no model value yet."""
    unread = [index for index in dict.fromkeys(nodes) if not tree.nodes[index].ended and tree.nodes[index].model_value is None]
    if unread:
        yield ValueRequest(tuple(unread))


def _expand(tree: Tree, leaves: list[int]) -> SearchPlan:
    """Draw the leaves' children and evaluate them if selection or the critic needs their values."""
    params = tree.params
    draws = [TurnRequest(index, number, "draw", 1) for index in leaves for number in range(params.expand_k)]
    if not draws:
        return
    results = iter((yield draws))
    added: list[int] = []
    for index in leaves:
        edges = [edge for _ in range(params.expand_k) for edge in next(results)]
        added += tree.draw(index, edges, tree.iterations + 1)
    if evaluates_children(params):
        yield from _evaluate(tree, added)


def _look_ahead(tree: Tree, leaves: list[int]) -> SearchPlan:
    """ReST-MCTS*: V of a leaf becomes the mean of V and the largest V along some greedy turns from it, which become nodes."""
    undrawn = [index for index in leaves if not tree.nodes[index].drawn]
    if not undrawn:
        return
    results = yield [TurnRequest(index, 0, "ahead", tree.params.evaluation.lookahead) for index in undrawn]
    paths = [tree.trace(index, edges, tree.iterations + 1) for index, edges in zip(undrawn, results, strict=True)]
    yield from _evaluate(tree, [node for path in paths for node in path])
    for index, path in zip(undrawn, paths, strict=True):
        leaf = tree.nodes[index]
        assert leaf.model_value is not None
        values = [value for node in path if (value := tree.nodes[node].model_value) is not None]
        leaf.model_value = 0.5 * leaf.model_value + 0.5 * max(values)
