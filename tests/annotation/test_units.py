"""Units of values: the return from an action on, where rewards are added up; returns outside [0, 1]."""

from __future__ import annotations

from typing import Any

import pytest
from tabular import grow

from stages.annotation.tree import Edge, Tree, tree_values
from stages.params import Annotate

MODEL: dict[str, Any] = {"expansion": {"kind": "eager"}, "evaluation": {"kind": "value_model"}, "labels": {"q": "tree"}}
ROOT = Edge("", (), (), "", (20,), 0.0, False, False, "")


def edge(token: int, reward: float = 0.0, end: bool = False) -> Edge:
    return Edge(str(token), (token,), (-0.5,), "", () if end else (11,), reward, end, False, "" if end else str(token))


def test_what_is_foreseen_is_what_a_visit_brings():
    """Contract: under discounted_max an end is foreseen as its own reward, and a history that the model gives a return of 0.9,
    0.3 of which came before this action and 0.2 with it, as 0.2 + 0.8 (0.9 - 0.5) = 0.52: the values of their first visits."""
    tree = Tree("t", ROOT, Annotate(backup="discounted_max", gamma=0.8, **MODEL))
    (above,) = tree.draw(0, [edge(1, 0.3)], 1)
    end, history = tree.draw(above, [edge(2, 0.5, end=True), edge(3, 0.2)], 1)
    tree.nodes[history].model_value = 0.9
    foreseen = [tree.foreseen(node) for node in (end, history)]
    assert foreseen == pytest.approx([0.5, 0.52])
    tree.insert(end, [], 1)
    tree.back_up(history, 0.9)
    assert [tree.nodes[node].value for node in (end, history)] == pytest.approx(foreseen)
    assert tree.nodes[above].value == pytest.approx(0.3 + 0.8 * 0.52)
    assert tree_values(tree.rows(), tree.params) == [node.value for node in tree.nodes]


def test_look_ahead_compares_returns_of_whole_episodes():
    """Contract: V/2 + max V/2 is a mixture of returns of episodes, whatever the backup adds up."""
    settings: dict[str, Any] = {**MODEL, "evaluation": {"kind": "value_model", "lookahead": 2}, "iterations": 1}
    plain, discounted = (grow(["a"], **settings, **more)[0] for more in ({}, {"backup": "discounted_max", "gamma": 0.5}))
    assert plain.nodes[0].model_value == discounted.nodes[0].model_value
