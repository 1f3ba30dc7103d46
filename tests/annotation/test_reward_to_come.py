"""Labels and targets are the reward still to come, whatever is paid on the way: every way through small tasks, beside exact V."""

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
"""The policy draws one of so many numbers, evenly; which move a number stands for depends on the state."""
DOMAINS: dict[str, tuple[dict[str, Any], int]] = {
    "search": ({"max_turns": 4}, 4),
    "shop": ({"max_turns": 5}, 5),
    "wordle": ({"reward": "lmrl", "max_turns": 4}, 4),
    "keydoor": ({"progress_reward": 0.5, "max_turns": 5}, 5),
    "calculator": ({"reward": "progress", "max_turns": 4}, 4),
}
"""Name -> settings and turns: success alone at the end; a graded end; a price on every turn; sub-goals; progress."""


class World:
    """One task, and what every move in it brings."""

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
        """The expert's move and others that the state admits."""
        admitted, best = list(self.environment.admissible()), self.domain.expert(self.environment)
        moves = [*([best] if best else []), *[move for move in admitted if "buy" in move], *admitted[:1], *admitted[-1:]]
        return list(dict.fromkeys(moves))

    def _step(self, way: tuple[int, ...]) -> tuple[Any, int]:
        """The last step of a way, and the number that its move is known by in the tree."""
        self.environment.restore(self.start)
        for at, number in enumerate(way):
            moves = self._moves()
            move = number % len(moves)
            step = self.environment.step(moves[move])
            assert not step.done or at == len(way) - 1
        return step, move


Worlds = Callable[[str], World]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return cache(lambda name: World(name, tmp_path_factory.mktemp(name)))


class Played:
    """A world whose every sequence of numbers was played once, as rollouts of the policy from the start."""

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

    def _value(self, way: tuple[int, ...] = ()) -> float:
        """V of the policy after a way, by recursion."""
        return sum(self.q((*way, number)) for number in range(MOVES)) / MOVES

    def q(self, way: tuple[int, ...]) -> float:
        """Q of the last move of a way."""
        step, _ = self.step(way)
        return step.reward + (0.0 if step.done else self.params.gamma * self.value(way))

    def way(self, node: int) -> tuple[int, ...]:
        return tuple(self.tree.nodes[index].edge.token_ids[0] for index in self.tree.path(node)[1:])


@pytest.mark.parametrize(
    ("name", "more"),
    [(name, more) for name in DOMAINS for more in ({}, {"q": "tree"})] + [("wordle", {"gamma": 0.5}), ("shop", {"gamma": 0.5})],
)
def test_labels_are_the_reward_still_to_come(worlds: Worlds, name: str, more: dict[str, Any]):
    """Contract: when every way of the policy was played once, q of a step is Q of the policy, its advantage is Q - V, and the
    step-value model's target at every history is V: rewards paid before count nowhere."""
    played = Played(worlds(name), **more)
    rows = played.tree.rows()
    paid = {row["reward"] for row in rows} - {0.0, 1.0}
    assert bool(paid) == (name != "search"), "the domain pays as it is here to pay"
    labels = label_rows(rows, played.params)
    assert len(labels) == len(rows)
    low, high = played.params.returns
    # The tree counts a return as the share of the way from the worst to the best.
    unit, zero = (1.0 / (high - low), -low / (high - low)) if "q" in more else (1.0, 0.0)
    for label in labels[1:]:
        way = played.way(label["node"])
        assert label["q"] == pytest.approx(zero + unit * played.q(way)), way
        assert label["advantage"] == pytest.approx(unit * (played.q(way) - played.value(way[:-1]))), way
    found = 0
    for path in value_paths(rows, played.params):
        for boundary, total, count in zip(path.boundaries, path.returns, path.rollouts, strict=True):
            way = tuple(token for token in path.token_ids[: boundary + 1] if token < MOVES + 1)
            assert total / count == pytest.approx(played.value(way)), way
            found += 1
    assert found == sum(not (row["terminal"] or row["truncated"]) for row in rows)


def test_where_success_alone_pays_labels_are_its_share(worlds: Worlds):
    """Contract: with rewards of 0 and 1 at the end alone, plain labels are the share of successes, to the bit, and tree and
    process values are what they are."""
    played = Played(worlds("search"))
    rows = played.tree.rows()
    labels = {label["node"]: label for label in label_rows(rows, played.params)}
    for row in rows:
        share = row["n_success"] / row["n_rollouts"]
        assert labels[row["node"]]["q"] == labels[row["node"]]["q_rollout"] == share
        assert labels[row["node"]]["q_tree"] == row["W"] / row["N"]
    assert 0 < rows[0]["n_success"] < rows[0]["n_rollouts"]


@pytest.mark.parametrize("name", list(DOMAINS))
def test_step_credit_of_exact_values_is_the_advantage(worlds: Worlds, name: str):
    """Contract: with the targets that the step-value model learns, r + V' - V is the exact advantage of every turn of every
    episode, and sums to the episode's return less V of its start."""
    played = Played(worlds(name))
    values = {
        tuple(token for token in path.token_ids[: boundary + 1] if token < MOVES + 1): total / count
        for path in value_paths(played.tree.rows(), played.params)
        for boundary, total, count in zip(path.boundaries, path.returns, path.rollouts, strict=True)
    }
    ways = [played.way(node.index) for node in played.tree.nodes if node.ended]
    longest = max(map(len, ways))
    turns = torch.tensor([len(way) for way in ways])
    states = [[values.get(way[:turn], 0.0) if turn < len(way) else 0.0 for turn in range(longest + 1)] for way in ways]
    rewards = [[played.step(way[: turn + 1])[0].reward if turn < len(way) else 0.0 for turn in range(longest)] for way in ways]
    found = {StepValues: StepValues(torch.tensor(states))}
    real = torch.arange(longest)[None, :] < turns[:, None]
    batch = SimpleNamespace(turns=turns, turn_rewards=torch.tensor(rewards), real_turns=real, get=found.get)
    credit = turn_credit(batch)  # type: ignore[arg-type]
    advantages = torch.tensor(
        [
            [played.q(way[: turn + 1]) - played.value(way[:turn]) if turn < len(way) else 0.0 for turn in range(longest)]
            for way in ways
        ]
    )
    torch.testing.assert_close(credit, advantages, atol=1e-5, rtol=0)
    torch.testing.assert_close(credit.sum(1), batch.turn_rewards.sum(1) - played.value(), atol=1e-5, rtol=0)
    assert advantages.abs().max() > 0.05


def test_best_values_count_no_reward_twice():
    """Contract: on a way that pays 0.2, 0.3 and 0.5, labels by `best` are what is still to be had from each action on, and the
    step-value model learns what is still to be had after it; advantages of the best way are 0."""
    tree = Tree("t", Edge("", (), (), "", (20,), 0.0, False, False, ""), Annotate(labels={"q": "best", "min_visits": 1}))
    ways = [[(1, 0.2), (1, 0.3), (1, 0.5)], [(1, 0.2), (2, 0.1)]]
    for number, way in enumerate(ways, start=1):
        last = len(way) - 1
        edges = [
            Edge(str(token), (token,), (-1.0,), "", () if place == last else (11,), reward, place == last, False, "")
            for place, (token, reward) in enumerate(way)
        ]
        tree.insert(0, edges, number)
    rows = tree.rows()
    labels = label_rows(rows, tree.params)
    assert [label["q"] for label in labels] == pytest.approx([1.0, 1.0, 0.8, 0.5, 0.1])
    assert [label["advantage"] for label in labels[1:]] == pytest.approx([0.0, 0.0, 0.0, 0.1 - 0.8])
    (path,) = value_paths(rows, tree.params)
    targets = [total / count for total, count in zip(path.returns, path.rollouts, strict=True)]
    assert targets == pytest.approx([1.0, 0.8, 0.5])
