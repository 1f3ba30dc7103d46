"""Node statistics: sums, rollouts as distinct from visits, backup rules, and the same values from stored rows."""

from dataclasses import replace

import pytest
from tabular import grow

from stages.annotation.labels import label_rows
from stages.annotation.nodes import children_of, tree_values
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree


def edge(token: int, reward: float = 0.0, end: bool = False, cut: bool = False) -> Edge:
    return Edge(str(token), (token,), (-0.5,), "", () if end or cut else (11,), reward, end, cut, "")


ROOT = Edge("", (), (), "", (20,), 0.0, False, False, "")


def check_invariants(tree: Tree, visits: int) -> None:
    visits_at_ends = 0
    for node in tree.nodes:
        children = [tree.nodes[index] for index in node.children]
        own = node.N - sum(child.N for child in children)
        visits_at_ends += own
        assert own >= 0
        assert own == 0 or node.ended
        below = sum(child.W for child in children) + own * node.total
        assert below == pytest.approx(node.W)
        assert 0 <= node.n_success <= node.n_rollouts <= node.N
        # Visits to a node that is not expanded yet are rollouts of the policy.
        assert node.ended or node.n_rollouts >= min(node.N, tree.params.expand_k)
    assert visits_at_ends == visits == sum(node.N for node in tree.nodes[:1])


def test_outcomes_are_summed():
    """Contract: outcomes +1, +1, -1, +1 give W = 2, N = 4, Q = 0.5."""
    tree = Tree("t", ROOT, Annotate(expand_k=9))
    for token, outcome in enumerate([1.0, 1.0, -1.0, 1.0]):
        tree.insert(0, [edge(token, outcome, end=True)], token + 1)
    root = tree.nodes[0]
    assert (root.W, root.N, root.value) == (2.0, 4, 0.5)
    assert (root.n_success, root.n_rollouts) == (3, 4)


def test_values_are_running_means():
    """Contract: returns 1, 0, 0.8 through one node give V = 1, 0.5, 0.6 and N = 3."""
    tree, seen = Tree("t", ROOT, Annotate(expand_k=9)), []
    for number, outcome in enumerate([1.0, 0.0, 0.8], start=1):
        tree.insert(0, [edge(0), edge(number, outcome, end=True)], number)
        seen.append(tree.nodes[1].value)
    assert seen == pytest.approx([1.0, 0.5, 0.6])
    assert tree.nodes[1].N == 3


@pytest.mark.parametrize("q", ["rollout", "tree"])
def test_one_success_gives_every_step_value_1(q: str):
    """Contract: Q of a step is the value of its node."""
    params = Annotate(expand_k=9, labels={"q": q, "min_visits": 1, "pool": q != "rollout"})
    tree = Tree("t", ROOT, params)
    tree.insert(0, [edge(0), edge(1), edge(2, 1.0, end=True)], 1)
    assert [node.value for node in tree.nodes[1:]] == [1.0, 1.0, 1.0]
    assert [label["q"] for label in label_rows(tree.rows(), params)[1:]] == [1.0, 1.0, 1.0]
    tree.insert(0, [edge(0), edge(3, 0.0, end=True)], 2)
    assert [label["q"] for label in label_rows(tree.rows(), params)[1:]] == [0.5, 1.0, 1.0, 0.0]


def test_success_term_overrides_the_return():
    """Contract: an environment's term `success` decides, not the return."""
    tree = Tree("t", ROOT, Annotate(expand_k=9))
    for token, (reward, success) in enumerate([(-2.0, 1.0), (1.0, 0.0), (-6.0, 0.0)]):
        tree.insert(0, [replace(edge(token, reward, end=True), success=success)], token + 1)
        assert tree.first_success == 1
    assert (tree.nodes[0].n_success, tree.nodes[0].n_rollouts) == (1, 3)


def test_rollouts_do_not_count_above_their_start():
    """Contract: a rollout counts as the policy's at its start and below; above, where selection led, only as a visit."""
    tree = Tree("t", ROOT, Annotate(expand_k=1))
    tree.insert(0, [edge(0), edge(1, 1.0, end=True)], 1)
    tree.insert(1, [edge(2, 0.0, end=True)], 2)
    root, child = tree.nodes[0], tree.nodes[1]
    assert (root.N, root.n_rollouts, root.n_success) == (2, 1, 1)
    assert (child.N, child.n_rollouts, child.n_success) == (2, 2, 1)


def test_equal_actions_share_a_node():
    """Contract: an action drawn again, token for token, is the same child."""
    tree = Tree("t", ROOT, Annotate(expand_k=4))
    tree.insert(0, [edge(0), edge(1, 1.0, end=True)], 1)
    tree.insert(0, [edge(0), edge(1, 1.0, end=True)], 2)
    tree.insert(0, [edge(0), edge(2, 0.0, end=True)], 3)
    assert [node.path for node in tree.nodes] == ["", "0", "0.0", "0.1"]
    assert [node.N for node in tree.nodes] == [3, 3, 2, 1]
    assert [node.iteration for node in tree.nodes] == [0, 1, 1, 3]


def test_discounted_max_follows_the_qlass_recursion():
    """Contract: reward 1 two steps below, gamma 0.9: 0.81, 0.9, 1."""
    tree = Tree("t", ROOT, Annotate(expand_k=1, backup="discounted_max", gamma=0.9))
    tree.insert(0, [edge(0), edge(1), edge(2, 1.0, end=True)], 1)
    assert [node.value for node in tree.nodes[1:]] == pytest.approx([0.81, 0.9, 1.0])


def test_max_backup_waits_for_expansion():
    """Contract: a node has the mean of its rollouts until it is expanded, then its best child's value."""
    tree = Tree("t", ROOT, Annotate(expand_k=3, backup="max"))
    tree.insert(0, [edge(0, 1.0, end=True)], 1)
    tree.insert(0, [edge(1, 0.0, end=True)], 2)
    assert tree.nodes[0].value == 0.5
    tree.insert(0, [edge(2, 0.0, end=True)], 3)
    assert tree.nodes[0].value == 1.0


@pytest.mark.parametrize("rollouts", [1, 3])
@pytest.mark.parametrize(("backup", "gamma"), [("mean", 1.0), ("max", 1.0), ("discounted_max", 0.8)])
def test_values_and_invariants_of_grown_trees(backup: str, gamma: float, rollouts: int):
    """Contract: root N = iterations x rollouts, N = sum over children + visits that ended here, and the stored rows give the live
    values bit for bit."""
    evaluation = {"rollouts": rollouts}
    for tree in grow(["a", "b"], backup=backup, gamma=gamma, iterations=60, expand_k=3, evaluation=evaluation):
        check_invariants(tree, visits=60 * rollouts)
        assert tree_values(tree.rows(), tree.params) == [node.value for node in tree.nodes]
        assert children_of(tree.rows()) == [node.children for node in tree.nodes]
