"""Labels and targets are the reward-to-go for any reward structure: every path through small tasks, compared with exact V."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.algorithms.parts.credit import StepValues, turn_credit
from stages.annotation.labels import label_rows
from stages.annotation.paths import value_paths
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree
from stages.environments.registry import load_domain, returns_of
from stages.records.task import SUCCESS_TERM

MOVES = 3
"""The policy draws one of this many numbers uniformly; the state decides which move a number means."""
DOMAINS: dict[str, tuple[dict[str, Any], int]] = {
    "search": ({"max_turns": 4}, 4),
    "shop": ({"max_turns": 5}, 5),
    "wordle": ({"reward": "lmrl", "max_turns": 4}, 4),
    "keydoor": ({"progress_reward": 0.5, "max_turns": 5}, 5),
    "calculator": ({"reward": "progress", "max_turns": 4}, 4),
}
"""Name -> settings and turns. Rewards: success at the end; graded; a cost per turn; sub-goals; progress."""


class World:
    """One task, and the result of every move in it."""

    def __init__(self, name: str, folder: Path) -> None:
        settings, self.turns = DOMAINS[name]
        self.domain = load_domain(name, settings)
        records = [record for record in self.domain.recipes(12, 0) if record["split"] == "train"]
        tasks = self.domain.build(records, folder, 1)
        self.environment = self.domain.make(folder)
        self.environment.reset(next((task for task in tasks if name == "shop" and task.difficulty == 1), tasks[0]))
        self.start = self.environment.snapshot()
        self.step = cache(self._step)

    def _moves(self) -> list[str]:
        """The expert's move and some others that the state admits."""
        admitted, best = list(self.environment.admissible()), self.domain.expert(self.environment)
        moves = [*([best] if best else []), *[move for move in admitted if "buy" in move], *admitted[:1], *admitted[-1:]]
        return list(dict.fromkeys(moves))

    def _step(self, numbers: tuple[int, ...]) -> tuple[Any, int]:
        """The last step of a path, and the number of its move in the tree."""
        self.environment.restore(self.start)
        for index, number in enumerate(numbers):
            moves = self._moves()
            move = number % len(moves)
            step = self.environment.step(moves[move])
            assert not step.done or index == len(numbers) - 1
        return step, move


Worlds = Callable[[str], World]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return cache(lambda name: World(name, tmp_path_factory.mktemp(name)))


class Enumerated:
    """A world in which every sequence of numbers was played once, as rollouts of the policy from the start."""

    def __init__(self, world: World, **params: Any) -> None:
        self.step, self.value = world.step, cache(self._value)
        labels = {"min_visits": 1, "pool": params.get("q", "rollout") != "rollout", "q": params.pop("q", "rollout")}
        head = {"v_min": -9.0, "v_max": 9.0, "bins": 201}
        self.params = Annotate(returns=list(returns_of(world.domain)), labels=labels, value_model={"head": head}, **params)
        self.tree = Tree("t", Edge("", (), (), "", (20,), 0.0, False, False, "start"), self.params)
        for number, numbers in enumerate(product(range(MOVES), repeat=world.turns), start=1):
            self.tree.insert(0, list(self._edges(numbers)), number)

    def _edges(self, numbers: tuple[int, ...]) -> Iterator[Edge]:
        for length in range(1, len(numbers) + 1):
            step, move = self.step(numbers[:length])
            yield Edge(
                *(str(move), (move,), (-1.0,), step.observation.text, () if step.done else (11,), step.reward),
                terminal=step.terminated,
                truncated=step.truncated,
                state_key="",
                success=step.terms.get(SUCCESS_TERM),
            )
            if step.done:
                return

    def _value(self, numbers: tuple[int, ...] = ()) -> float:
        """V of the policy after a path, by recursion."""
        return sum(self.q((*numbers, number)) for number in range(MOVES)) / MOVES

    def q(self, numbers: tuple[int, ...]) -> float:
        """Q of the last move of a path."""
        step, _ = self.step(numbers)
        return step.reward + (0.0 if step.done else self.params.gamma * self.value(numbers))

    def numbers(self, node: int) -> tuple[int, ...]:
        return tuple(self.tree.nodes[index].edge.token_ids[0] for index in self.tree.path(node)[1:])


@pytest.mark.parametrize(
    ("name", "more"),
    [(name, more) for name in DOMAINS for more in ({}, {"q": "tree"})] + [("wordle", {"gamma": 0.5}), ("shop", {"gamma": 0.5})],
)
def test_labels_are_the_reward_to_go(worlds: Worlds, name: str, more: dict[str, Any]):
    """Contract: with every path of the policy played once, q of a step is the policy's Q, its advantage is Q - V, and the
    step-value model's target at every history is V; earlier rewards do not count."""
    enumerated = Enumerated(worlds(name), **more)
    rows = enumerated.tree.rows()
    paid = {row["reward"] for row in rows} - {0.0, 1.0}
    assert bool(paid) == (name != "search"), "the domain has the rewards assumed here"
    labels = label_rows(rows, enumerated.params)
    assert len(labels) == len(rows)
    low, high = enumerated.params.returns
    # The tree scales returns to [0, 1].
    unit, zero = (1.0 / (high - low), -low / (high - low)) if "q" in more else (1.0, 0.0)
    for label in labels[1:]:
        numbers = enumerated.numbers(label["node"])
        assert label["q"] == pytest.approx(zero + unit * enumerated.q(numbers)), numbers
        assert label["advantage"] == pytest.approx(unit * (enumerated.q(numbers) - enumerated.value(numbers[:-1]))), numbers
    found = 0
    for path in value_paths(rows, enumerated.params):
        for boundary, total, count in zip(path.boundaries, path.returns, path.rollouts, strict=True):
            numbers = tuple(token for token in path.token_ids[: boundary + 1] if token < MOVES + 1)
            assert total / count == pytest.approx(enumerated.value(numbers)), numbers
            found += 1
    assert found == sum(not (row["terminal"] or row["truncated"]) for row in rows)


def test_labels_of_sparse_rewards_are_success_rates(worlds: Worlds):
    """Contract: with rewards of 0 and 1 only at the end, plain labels are exactly the success rate, and q_tree is W / N."""
    enumerated = Enumerated(worlds("search"))
    rows = enumerated.tree.rows()
    labels = {label["node"]: label for label in label_rows(rows, enumerated.params)}
    for row in rows:
        share = row["n_success"] / row["n_rollouts"]
        assert labels[row["node"]]["q"] == labels[row["node"]]["q_rollout"] == share
        assert labels[row["node"]]["q_tree"] == row["W"] / row["N"]
    assert 0 < rows[0]["n_success"] < rows[0]["n_rollouts"]


@pytest.mark.parametrize("name", list(DOMAINS))
def test_step_credit_of_exact_values_is_the_exact_advantage(worlds: Worlds, name: str):
    """Contract: with the step-value model's targets r + V' - V is the exact advantage of every turn of every episode, and sums to
    the return minus V of the start."""
    enumerated = Enumerated(worlds(name))
    values = {
        tuple(token for token in path.token_ids[: boundary + 1] if token < MOVES + 1): total / count
        for path in value_paths(enumerated.tree.rows(), enumerated.params)
        for boundary, total, count in zip(path.boundaries, path.returns, path.rollouts, strict=True)
    }
    paths = [enumerated.numbers(node.index) for node in enumerated.tree.nodes if node.ended]
    longest = max(map(len, paths))
    turns = torch.tensor([len(numbers) for numbers in paths])
    states = [
        [values.get(numbers[:turn], 0.0) if turn < len(numbers) else 0.0 for turn in range(longest + 1)] for numbers in paths
    ]
    rewards = [
        [enumerated.step(numbers[: turn + 1])[0].reward if turn < len(numbers) else 0.0 for turn in range(longest)]
        for numbers in paths
    ]
    found = {StepValues: StepValues(torch.tensor(states))}
    real = torch.arange(longest)[None, :] < turns[:, None]
    batch = SimpleNamespace(turns=turns, turn_rewards=torch.tensor(rewards), real_turns=real, get=found.get)
    credit = turn_credit(batch)  # type: ignore[arg-type]
    advantages = torch.tensor(
        [
            [
                enumerated.q(numbers[: turn + 1]) - enumerated.value(numbers[:turn]) if turn < len(numbers) else 0.0
                for turn in range(longest)
            ]
            for numbers in paths
        ]
    )
    torch.testing.assert_close(credit, advantages, atol=1e-5, rtol=0)
    torch.testing.assert_close(credit.sum(1), batch.turn_rewards.sum(1) - enumerated.value(), atol=1e-5, rtol=0)
    assert advantages.abs().max() > 0.05


def test_best_labels_count_no_reward_twice():
    """Contract: on a path with rewards 0.2, 0.3 and 0.5, labels by `best` are the best reward from each action on, the step-value
    targets the best reward after it; advantages of the best path are 0."""
    tree = Tree("t", Edge("", (), (), "", (20,), 0.0, False, False, ""), Annotate(labels={"q": "best", "min_visits": 1}))
    paths = [[(1, 0.2), (1, 0.3), (1, 0.5)], [(1, 0.2), (2, 0.1)]]
    for number, steps in enumerate(paths, start=1):
        last = len(steps) - 1
        edges = [
            Edge(str(token), (token,), (-1.0,), "", () if place == last else (11,), reward, place == last, False, "")
            for place, (token, reward) in enumerate(steps)
        ]
        tree.insert(0, edges, number)
    rows = tree.rows()
    labels = label_rows(rows, tree.params)
    assert [label["q"] for label in labels] == pytest.approx([1.0, 1.0, 0.8, 0.5, 0.1])
    assert [label["advantage"] for label in labels[1:]] == pytest.approx([0.0, 0.0, 0.0, 0.1 - 0.8])
    (path,) = value_paths(rows, tree.params)
    targets = [total / count for total, count in zip(path.returns, path.rollouts, strict=True)]
    assert targets == pytest.approx([1.0, 0.8, 0.5])
