"""How a tree is grown: a plan is a generator that asks for work (turns to be played, histories to be valued) and enters what
comes back. It knows nothing of engines and environments, and one tree's plan knows nothing of another's.

lazy   descend to the first node whose next action was not drawn `expand_k` times; let the policy play from there to the end.
       Every rollout is a draw at all nodes that it passes, so expansion and evaluation are one.
eager  descend to a leaf; draw `expand_k` actions there at once; value the leaf by a rollout from one of its children (LATS,
       rStar), by the value model (ReST-MCTS*), or by both. The model's word on the leaf and the draws come out of the same pass.
flat, omega  stages/annotation/solutions.py

With `leaves_per_tree` above 1, leaves are chosen one after the other, those before them counting as under way; all are evaluated
at once, then entered in the order of their choice: what becomes of a tree never depends on which of them was finished first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.annotation.solutions import flat, omega
from stages.annotation.tree import Tree
from stages.annotation.units import evaluates_children, uses_value_model
from stages.annotation.work import SearchPlan, TurnRequest, ValueRequest, stopped

if TYPE_CHECKING:
    from stages.annotation.tree import Edge


def search_plan(tree: Tree) -> SearchPlan:
    """The plan that the tree's parameters name."""
    if tree.params.selection.rule in ("flat", "omega"):
        return flat(tree) if tree.params.selection.rule == "flat" else omega(tree)
    return eager(tree) if tree.params.expansion.kind == "eager" else lazy(tree)


@dataclass
class _Leaf:
    """A leaf that was chosen. `first`: number of its first rollout; `start`: where rollouts begin."""

    index: int
    first: int
    start: int
    plays: list[TurnRequest]
    results: list[list[Edge]]


def _choose(tree: Tree, apart: bool) -> list[_Leaf]:
    """As many leaves as are evaluated at once, noted as under way; `apart`: no leaf twice."""
    params = tree.params
    visits = params.evaluation.rollouts
    leaves: list[_Leaf] = []
    for number in range(min(params.leaves_per_tree, params.iterations - tree.iterations)):
        index = tree.descend(number)
        node = tree.nodes[index]
        if apart and any(leaf.index == index for leaf in leaves):
            break
        leaves.append(_Leaf(index, node.n_rollouts + node.pending, index, [], []))
        tree.pend(index, visits)
    return leaves


def _rollouts(tree: Tree, leaves: list[_Leaf]) -> SearchPlan:
    """Play the rollouts of all leaves whose start is no end."""
    for leaf in leaves:
        if not tree.nodes[leaf.start].ended:
            leaf.plays = [TurnRequest(leaf.start, leaf.first + number) for number in range(tree.params.evaluation.rollouts)]
    plays = [play for leaf in leaves for play in leaf.plays]
    if plays:
        results = iter((yield plays))
        for leaf in leaves:
            leaf.results = [next(results) for _ in leaf.plays]


def _enter(tree: Tree, leaf: _Leaf, model_value: float | None) -> None:
    """An iteration's end: its rollouts in their order; an end known before counts as often."""
    tree.pend(leaf.index, -tree.params.evaluation.rollouts)
    tree.iterations += 1
    if not leaf.plays:
        tree.counters["known_ends"] += 1
    for edges in leaf.results or [[]] * tree.params.evaluation.rollouts:
        tree.insert(leaf.start, edges, tree.iterations, model_value if leaf.plays else None)


def lazy(tree: Tree) -> SearchPlan:
    mixed = tree.params.evaluation.kind == "mixed"
    while not stopped(tree):
        leaves = _choose(tree, apart=False)
        if mixed:
            yield from _read(tree, [leaf.index for leaf in leaves if not tree.nodes[leaf.index].ended])
        yield from _rollouts(tree, leaves)
        for leaf in leaves:
            _enter(tree, leaf, tree.nodes[leaf.index].model_value if mixed else None)


def eager(tree: Tree) -> SearchPlan:
    params = tree.params
    evaluation = params.evaluation
    while not stopped(tree):
        leaves = _choose(tree, apart=True)
        opened = [leaf.index for leaf in leaves if not tree.nodes[leaf.index].ended]
        if uses_value_model(evaluation):
            yield from _read(tree, opened)
        if evaluation.lookahead:
            yield from _look_ahead(tree, opened)
        yield from _expand(tree, [index for index in opened if not tree.nodes[index].drawn])
        if evaluation.kind != "value_model":
            for leaf in leaves:
                leaf.start = _start(tree, leaf.index)
                leaf.first = tree.nodes[leaf.start].n_rollouts
            yield from _rollouts(tree, leaves)
        for leaf in leaves:
            node = tree.nodes[leaf.index]
            if evaluation.kind != "value_model" or node.ended:
                _enter(tree, leaf, node.model_value if evaluation.kind == "mixed" else None)
                continue
            tree.pend(leaf.index, -1)
            tree.iterations += 1
            assert node.model_value is not None
            tree.back_up(leaf.index, node.model_value)


def _start(tree: Tree, index: int) -> int:
    """Where a leaf's rollouts begin: at the child that selection prefers, or at the leaf if it has none."""
    node = tree.nodes[index]
    children = [tree.nodes[child] for child in node.children]
    opened = [child for child in children if not child.known] or children
    return tree.choose(node, opened).index if opened else index


def _read(tree: Tree, nodes: list[int]) -> SearchPlan:
    """Let the value model read nodes that it has not read."""
    fresh = tuple(index for index in dict.fromkeys(nodes) if tree.nodes[index].model_value is None)
    if fresh:
        yield ValueRequest(fresh)


def _expand(tree: Tree, leaves: list[int]) -> SearchPlan:
    """Draw the leaves' children; where selection or the critic asks for it, have them read."""
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
        yield from _read(tree, [child for child in added if not tree.nodes[child].ended])


def _look_ahead(tree: Tree, leaves: list[int]) -> SearchPlan:
    """ReST-MCTS*: V of a leaf becomes V/2 + the largest V along some greedy turns from it / 2; their states become nodes."""
    fresh = [index for index in leaves if not tree.nodes[index].drawn]
    if not fresh:
        return
    results = yield [TurnRequest(index, 0, "ahead", tree.params.evaluation.lookahead) for index in fresh]
    ways = [tree.trace(index, edges, tree.iterations + 1) for index, edges in zip(fresh, results, strict=True)]
    yield from _read(tree, [node for way in ways for node in way if not tree.nodes[node].ended])
    for index, way in zip(fresh, ways, strict=True):
        leaf = tree.nodes[index]
        assert leaf.model_value is not None
        said = [value for node in way if (value := tree.nodes[node].model_value) is not None]
        leaf.model_value = 0.5 * leaf.model_value + 0.5 * max(said)
