"""Play by search: look ahead from the present state, take the best action found, and go on from there with what the tree holds.

Environments of the pipeline repeat the same answers, so an end that a simulated episode reached can be reached again: the action
taken is the one with the best return found below it, of equal ones that of the higher value, and of these the first. Once an
episode of the highest possible return is known, it is played to its end without further search.
"""

from __future__ import annotations

from stages.annotation.requests import SearchPlan, TurnRequest
from stages.annotation.tree import Tree


def moves(tree: Tree, searches: int, played: list[int]) -> SearchPlan:
    """The plan that plays one episode, with `searches` simulated episodes before each of its turns; appends its nodes, without
    the root, to `played`."""
    at = 0
    while not tree.nodes[at].ended:
        for _ in range(searches):
            if tree.nodes[at].exhausted or best_return(tree, at) >= tree.params.returns[1]:
                break
            leaf = tree.descend(top=at)
            (edges,) = yield [TurnRequest(leaf, tree.nodes[leaf].n_rollouts)]
            tree.iterations += 1
            tree.insert(leaf, edges, tree.iterations)
        at = best_child(tree, at)
        played.append(at)


def best_return(tree: Tree, index: int) -> float:
    """The highest return of an episode through the node; -inf if none was simulated."""
    node = tree.nodes[index]
    if node.ended:
        return node.total
    return max((best_return(tree, child) for child in node.children), default=float("-inf"))


def best_child(tree: Tree, index: int) -> int:
    """The action to take at a node. Raises ValueError if nothing was simulated from it."""
    children = tree.nodes[index].children
    return max(children, key=lambda child: (best_return(tree, child), tree.nodes[child].value, -child))
