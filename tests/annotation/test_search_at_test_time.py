"""Play by search: it finds what the policy can reach, and no more than it needs."""

from __future__ import annotations

from itertools import product

import pytest
from tabular import ROOT

from stages.annotation.moves import best_child, moves
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree
from stages.claims.known_tree import ARMS, DEPTH, Actions, Chat, FakeEngine, Pool, pay, task, value
from stages.evaluation.settings import TreeSearch
from stages.params import check_domains, parse_params
from stages.runtime.validation import ParamsError


def played_worlds(searches: int, worlds: range, **params: int) -> list[tuple[Actions, Tree]]:
    """Moves and tree of an episode in each world of kind sure, where leaves pay 1 or 0."""
    paths: dict[str, list[int]] = {str(world): [] for world in worlds}
    search = Search(
        FakeEngine(),
        Chat(),
        Pool(),
        Annotate(**params),
        0,
        10_000,
        plan=lambda tree: moves(tree, searches, paths[tree.task_id]),
    )
    trees = search.grow([task(str(world), world, "sure") for world in worlds])
    found = []
    for tree in trees:
        edges = [tree.nodes[node].edge for node in paths[tree.task_id]]
        assert edges[-1].terminal
        found.append((tuple(edge.token_ids[0] for edge in edges), tree))
    return found


def test_enough_search_plays_the_best_episode() -> None:
    """Against a brute-force maximum over all leaves."""
    worlds = range(20)
    for world, (actions, _) in zip(worlds, played_worlds(400, worlds, expand_k=30), strict=True):
        best = max(pay(world, leaf, "sure") for leaf in product(range(ARMS), repeat=DEPTH))
        assert pay(world, actions, "sure") == best == 1.0


def test_a_little_search_does_better_than_the_policy() -> None:
    worlds = range(40)
    policy = sum(value(world, (), kind="sure") for world in worlds) / len(worlds)
    one, four = (sum(pay(int(tree.task_id), done, "sure") for done, tree in played_worlds(n, worlds)) / 40 for n in (1, 4))
    assert policy < 0.35
    assert one > policy + 0.2, "an episode that was not chosen is searched for again from its first state on"
    assert four > one


def test_search_ends_with_the_first_episode_of_the_highest_return() -> None:
    for actions, tree in played_worlds(50, range(20)):
        assert pay(int(tree.task_id), actions, "sure") == 1.0
        assert tree.first_success == tree.iterations


def test_the_best_child_has_the_best_end_then_the_highest_value_then_came_first() -> None:
    def grown(*returns: tuple[int, float]) -> Tree:
        tree = Tree("t", ROOT, Annotate())
        for place, (action, reward) in enumerate(returns):
            first = Edge(str(action), (action,), (0.0,), "", (11,), 0.0, False, False, str(action))
            last = Edge("end", (place,), (0.0,), "", (), reward, True, False, "end")
            tree.insert(0, [first, last], place + 1)
        return tree

    for returns, best in (
        ([(0, 0.0), (1, 1.0), (1, 0.0), (0, 0.5)], 1),
        ([(0, 0.5), (0, 0.0), (1, 0.5)], 1),
        ([(2, 0.5), (1, 0.5)], 2),
    ):
        tree = grown(*returns)
        assert tree.nodes[best_child(tree, 0)].edge.token_ids == (best,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"returns": [1.0, 0.0]}, r"returns must be \[low, high\]"),
        ({"sampling": {"temperature": 0.0}}, "would draw the same action each time"),
        ({"sampling": {"top_k": 1}}, "would draw the same action each time"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeSearch.model_validate(changes)


def test_returns_of_the_search_are_the_domains() -> None:
    """Contract: where episodes return [-6, 0], a search that takes 1 for the highest return would never know the best one."""
    wordle = {"environment": {"reward": "lmrl"}, "annotate": {"returns": [-6.0, 0.0]}}

    def checked(**evaluate: object) -> None:
        check_domains(parse_params({"domains": ["wordle"], "per_domain": {"wordle": wordle}, "evaluate": evaluate}))

    checked(models=["sft"])
    checked(models=["sft+search"], search={"returns": [-6.0, 0.0]})
    with pytest.raises(ParamsError, match=r"search\.returns is \[0\.0, 1\.0\], and episodes of wordle return \[-6\.0, 0\.0\]"):
        checked(models=["sft+search"])
