"""Tree search on a random 3-ary tree of depth 4 whose policy Q and Q* are known by recursion."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from tabular import actions_of, grow

from stages.annotation.nodes import tree_values
from stages.annotation.settings import Annotate
from stages.claims.known_tree import ARMS, DEPTH, leaf, value

MOVES = [(arm,) for arm in range(ARMS)]


def test_rollout_labels_estimate_policy_q():
    """Contract: n_success / n_rollouts is the policy's Q within sampling error at every state although UCT steers the visits; W /
    N at the root lies between it and Q*."""
    counts: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0])
    tree_mean = 0.0
    trees = grow([f"t{number}" for number in range(200)], width=200, iterations=48, expand_k=4, selection={"c": 0.5})
    for tree in trees:
        tree_mean += tree.nodes[0].W / tree.nodes[0].N / len(trees)
        for node in tree.nodes:
            if not node.ended:
                counts[actions_of(tree, node.index)][0] += node.n_success
                counts[actions_of(tree, node.index)][1] += node.n_rollouts
    scores = []
    for actions, (successes, rollouts) in counts.items():
        q = value(0, actions)
        if rollouts * min(q, 1 - q) >= 5:
            scores.append((successes - rollouts * q) / math.sqrt(rollouts * q * (1 - q)))
    assert len(scores) >= 60
    # Outcomes of nodes on one path are correlated, so this is a bound and not a test at a level.
    assert sum(score**2 for score in scores) / len(scores) < 1.5
    assert abs(sum(scores) / len(scores)) < 0.5
    q_root = value(0, ())
    assert abs(counts[()][0] / counts[()][1] - q_root) < 3 * math.sqrt(q_root * (1 - q_root) / counts[()][1])
    assert q_root + 0.05 < tree_mean < value(0, (), best=True)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
def test_max_backup_finds_the_best_arm(world: int):
    """Contract: with max backup the root's value becomes exactly Q*, and UCT visits the best first move most."""
    (tree,) = grow(["a"], world=world, kind="paid", iterations=3000, expand_k=20, backup="max", selection={"c": 0.5})
    root = tree.nodes[0]
    assert len(root.children) == ARMS
    assert root.value == pytest.approx(value(world, (), best=True))
    most = max(root.children, key=lambda index: tree.nodes[index].N)
    assert actions_of(tree, most) == max(MOVES, key=lambda move: value(world, move, best=True))
    assert tree.nodes[most].N > root.N / 2


def test_mean_backup_moves_from_policy_q_towards_q_star():
    """Contract: W / N is neither: with more visits it moves from the policy's value to the best one."""
    few, many = (grow(["a"], world=2, kind="paid", iterations=count, expand_k=20)[0].nodes[0] for count in (20, 6000))
    assert value(2, ()) < many.W / many.N < value(2, (), best=True)
    assert few.W / few.N < many.W / many.N


def test_discounted_max_of_an_exhausted_tree():
    """Contract: discounted max of a fully explored tree is gamma^depth times the best leaf's reward."""
    (tree,) = grow(["a"], kind="paid", iterations=2500, expand_k=30, backup="discounted_max", gamma=0.9, selection={"c": 5.0})
    leaves = [node for node in tree.nodes if node.ended]
    assert len(leaves) == ARMS**DEPTH
    best = max(leaf(0, actions_of(tree, node.index)) for node in leaves)
    assert tree.nodes[0].value == pytest.approx(0.9**DEPTH * best)
    assert tree_values(tree.rows(), Annotate(expand_k=30, backup="max"))[0] == pytest.approx(best)
