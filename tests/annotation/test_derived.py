"""Units of values: the return from an action on, and returns outside [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tabular import grow

from stages.annotation.calibration import calibration
from stages.annotation.derived import scaled_return, unscaled_return
from stages.annotation.labels import best_values
from stages.annotation.nodes import tree_values
from stages.annotation.paths import value_paths
from stages.annotation.search import Search
from stages.annotation.selection import Arm, virtual
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree
from stages.claims.known_tree import Chat, FakeEngine, Pool, task

MODEL: dict[str, Any] = {"expansion": {"kind": "eager"}, "evaluation": {"kind": "value_model"}, "labels": {"q": "tree"}}
ROOT = Edge("", (), (), "", (20,), 0.0, False, False, "")


def edge(token: int, reward: float = 0.0, end: bool = False) -> Edge:
    return Edge(str(token), (token,), (-0.5,), "", () if end else (11,), reward, end, False, "" if end else str(token))


def test_predicted_values_equal_those_of_a_first_visit():
    """Contract: under discounted_max a terminal is predicted as its own reward, and a history with a model return of 0.9, of
    which 0.3 came before this action and 0.2 with it, as 0.2 + 0.8 (0.9 - 0.5) = 0.52."""
    tree = Tree("t", ROOT, Annotate(backup="discounted_max", gamma=0.8, **MODEL))
    (above,) = tree.draw(0, [edge(1, 0.3)], 1)
    end, history = tree.draw(above, [edge(2, 0.5, end=True), edge(3, 0.2)], 1)
    tree.nodes[history].model_value = 0.9
    predicted_value = [tree.predicted_value(node) for node in (end, history)]
    assert predicted_value == pytest.approx([0.5, 0.52])
    tree.insert(end, [], 1)
    tree.back_up(history, 0.9)
    assert [tree.nodes[node].value for node in (end, history)] == pytest.approx(predicted_value)
    assert tree.nodes[above].value == pytest.approx(0.3 + 0.8 * 0.52)
    assert tree_values(tree.rows(), tree.params) == [node.value for node in tree.nodes]


def test_lookahead_compares_returns_of_episodes():
    """Contract: V/2 + max V/2 mixes returns of episodes under any backup."""
    settings: dict[str, Any] = {**MODEL, "evaluation": {"kind": "value_model", "lookahead": 2}, "iterations": 1}
    plain, discounted = (grow(["a"], **settings, **more)[0] for more in ({}, {"backup": "discounted_max", "gamma": 0.5}))
    assert plain.nodes[0].model_value == discounted.nodes[0].model_value


# ---- returns outside [0, 1] -------------------------------------------------------------------------------------------------

LMRL: dict[str, Any] = {"returns": [-6.0, 0.0]}
"""Wordle's returns under LMRL-Gym's rewards."""
WIDE = {"v_min": -6.5, "v_max": 0.5}


class ConstantReader:
    """A value model with a constant output."""

    def __init__(self, engine: FakeEngine, value: float) -> None:
        self.engine, self.value = engine, value

    def values(self, sessions: Sequence[int]) -> list[float]:
        return [self.value] * len(sessions)


@pytest.mark.parametrize(
    ("reward_range", "value", "expected"),
    [
        ([0.0, 1.0], -4.5, 0.25),
        ([-1.0, 1.0], -1.5, 0.5),
        ([0.0, 1.0], 0.7, 1.0),  # no return is above 0
        ([0.0, 1.0], -9.0, 0.0),
    ],
)
def test_model_values_are_clamped_and_scaled(reward_range: list[float], value: float, expected: float):
    """Contract: the model's output is clamped to the possible returns and scaled to reward_range."""
    params = Annotate(**MODEL, **LMRL, reward_range=reward_range, value_model={"head": WIDE}, iterations=3)
    engine = FakeEngine()
    (tree,) = Search(engine, Chat(), Pool(), params, 0, 10_000, reader=ConstantReader(engine, value)).grow([task("a")])
    assert tree.nodes[0].model_value == pytest.approx(expected)


def test_scaled_returns_and_pessimistic_values():
    """Contract: returns -6, -3 and 0 scale to 0, 0.5 and 1, but not under discounted_max; a visit with virtual loss and an unread
    history have the lowest value."""
    for more, expected in (({}, [0.0, 0.5, 1.0]), ({"backup": "discounted_max"}, [-6.0, -3.0, 0.0])):
        params = Annotate(**MODEL, **LMRL, **more, value_model={"head": WIDE}, virtual="loss", leaves_per_tree=2)
        assert [scaled_return(params, total) for total in (-6.0, -3.0, 0.0)] == expected
        assert [unscaled_return(params, value) for value in expected] == pytest.approx([-6.0, -3.0, 0.0])
        assert virtual(params, Arm(expected[1], 1, 0.0), 1).q == (expected[0] + expected[1]) / 2
        tree = Tree("t", ROOT, params)
        (child,) = tree.draw(0, [edge(1)], 1)
        assert tree.predicted_value(child) == expected[0]


def test_best_values_ignore_unvisited_children():
    """Contract: a child without visits or terminals below does not count as 0 for its parent; a terminal counts, visited or
    not."""
    base = {"task_id": "t", "terminal": False, "truncated": False, "N": 0, "reward": 0.0}
    tree = [
        {**base, "node": 0, "parent": -1, "N": 3},
        {**base, "node": 1, "parent": 0, "N": 2, "reward": -1.0},
        {**base, "node": 2, "parent": 0},
        {**base, "node": 3, "parent": 1, "reward": -3.0, "terminal": True},
        {**base, "node": 4, "parent": 1},
    ]
    assert best_values(tree, 0.5) == [0.5 * (-1.0 + 0.5 * -3.0), -1.0 + 0.5 * -3.0, 0.0, -3.0, 0.0]


def test_tree_values_are_scaled_back_to_returns():
    """Contract: targets from the tree's values are scaled back to returns."""
    base = {"task_id": "t", "terminal": False, "truncated": False, "reward": 0.0, "token_ids": [1], "context_ids": [2]}
    rows = [
        {**base, "node": 0, "parent": -1, "N": 4, "W": -1.0, "n_rollouts": 4, "n_success": 0},
        {**base, "node": 1, "parent": 0, "N": 2, "W": 0.5, "n_rollouts": 2, "n_success": 0},
    ]
    params = Annotate(**LMRL, reward_range=[-1.0, 1.0], labels={"q": "tree"}, value_model={"head": WIDE})
    (path,) = value_paths(rows, params)
    assert [total / count for total, count in zip(path.returns, path.rollouts, strict=True)] == pytest.approx([-3.75, -2.25])


def test_calibration_scales_returns_to_the_unit_range():
    """Contract: values in [-6, 0] are evaluated after scaling to [0, 1]."""
    shares, predicted, counts = np.array([0.0, 0.5, 1.0]), np.array([0.1, 0.4, 0.9]), np.array([4.0, 2.0, 4.0])
    plain = calibration(predicted, shares, counts, 0.5)
    found = calibration(6 * predicted - 6, 6 * shares - 6, counts, -3.0, (-6.0, 0.0))
    for name in ("brier", "mse", "baseline_mse", "explained_variance", "ece", "mean_predicted"):
        assert found[name] == pytest.approx(plain[name])
    assert len(found["bins"]) == len(plain["bins"]) == 3
