"""Exact values of keydoor: by hand, against brute force, and those of the optimal policy."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from keydoor_worlds import LEVELS, hand_task, hand_world, solution

from stages.environments.keydoor import KeydoorDomain, KeydoorEnvironment, KeydoorSettings
from stages.environments.keydoor.exact import ExactValues, from_table, uniform
from stages.environments.keydoor.world import State, World
from stages.records.task import Task


@pytest.fixture(scope="module")
def domain() -> KeydoorDomain:
    return KeydoorDomain(KeydoorSettings(levels=LEVELS))


def test_exact_values_by_hand() -> None:
    """A fork of two rooms with the lamp in one; the uniform policy, with refused actions 1/4 of the time."""
    world = World("Balbas", {"Corbis": "Balbas", "Dorvin": "Balbas"}, {}, {"Corbis": "lamp"}, "lamp", False)
    settings = KeydoorSettings(max_turns=2)

    def policy(key: str, turn: int, admissible: tuple[str, ...]) -> dict[str, float]:
        return dict.fromkeys(admissible, 0.75 / len(admissible))

    exact = ExactValues(hand_task(world), settings, policy)
    # Two turns suffice only for go, take: each of three admissible actions has probability 1/4.
    assert exact.value(world.initial(), 0) == pytest.approx(1 / 16)
    steps = exact.episode(["go Corbis", "take lamp"])
    assert [(step.value, step.q) for step in steps] == [pytest.approx((1 / 16, 1 / 4)), pytest.approx((1 / 4, 1.0))]
    assert [step.advantage for step in steps] == pytest.approx([3 / 16, 3 / 4])
    assert [step.advantage for step in exact.episode(["go Dorvin", "nonsense"])] == pytest.approx([-1 / 16, 0.0])
    assert [step.state_key for step in steps] == ["hand#Balbas|||", "hand#Corbis|||"]


def brute_force(exact: ExactValues, state: State, turn: int, environment: KeydoorEnvironment) -> float:
    """The expected return from `state`, by playing every action of the environment, refused ones included, to the end."""
    if environment.snapshot().over:
        return 0.0
    now, total = environment.snapshot(), 0.0
    chances = dict(exact.probabilities(now.world, turn))
    chances["refused"] = 1.0 - sum(chances.values())
    for action, chance in chances.items():
        if chance > 0.0:
            environment.restore(now)
            step = environment.step(action)
            later = brute_force(exact, environment.snapshot().world, turn + 1, environment)
            total += chance * (step.reward + exact.gamma * later)
    environment.restore(now)
    return total


@pytest.mark.parametrize(("share", "gamma"), [(0.0, 1.0), (0.5, 0.9)])
def test_exact_values_equal_brute_force(tasks: list[Task], tmp_path: Path, share: float, gamma: float) -> None:
    """Contract: dynamic programming equals enumeration of every episode of the real environment, in every state met."""
    settings = KeydoorSettings(max_turns=5, progress_reward=share)
    environment = KeydoorDomain(settings).make(tmp_path)

    def policy(key: str, turn: int, admissible: tuple[str, ...]) -> dict[str, float]:
        """Depends on state and turn; the rest of the probability is refused actions."""
        rng = Random(f"{key} {turn}")
        weights = [rng.random() for _ in range(len(admissible) + 1)]
        return {action: weight / sum(weights) for action, weight in zip(admissible, weights, strict=False)}

    short = next(task for task in tasks if task.difficulty == 3.0)
    for task in (hand_task(hand_world()), short):
        exact = ExactValues(task, settings, policy, gamma)
        environment.reset(task)
        rng = Random(1)
        for turn in range(settings.max_turns):
            state = environment.snapshot()
            if state.over:
                break
            value = brute_force(exact, state.world, turn, environment)
            assert exact.value(state.world, turn) == pytest.approx(value, abs=1e-12)
            environment.step(rng.choice(list(environment.admissible())))


@pytest.mark.parametrize("policy", [uniform, None])
def test_advantages_have_mean_zero_and_optimal_ones_are_not_positive(tasks: list[Task], policy) -> None:
    for task in tasks[:4]:
        settings = KeydoorSettings(max_turns=12)
        exact = ExactValues(task, settings, policy)
        for turn in (0, 5, 11):
            for state, moves in exact.world.states.items():
                if not moves:
                    continue
                advantages = {action: exact.q(state, turn, action) - exact.value(state, turn) for action in moves}
                chances = exact.probabilities(state, turn)
                assert sum(chances[action] * advantages[action] for action in chances) == pytest.approx(0.0, abs=1e-12)
                if policy is None:
                    assert max(advantages.values()) <= 1e-12


def test_optimal_values_are_discounted_distances(domain: KeydoorDomain, tasks: list[Task]) -> None:
    """Contract: V* = gamma^(distance - 1) if enough turns remain, else 0; the expert's steps have advantage 0."""
    settings = KeydoorSettings(max_turns=12)
    for task in tasks[:8]:
        exact = ExactValues(task, settings, gamma=0.9)
        for turn in (0, 4, 9):
            for state, distance in exact.world.distances.items():
                expected = 0.9 ** (distance - 1) if 0 < distance <= 12 - turn else 0.0
                assert exact.value(state, turn) == pytest.approx(expected)
        if task.difficulty <= 12:
            steps = exact.episode(solution(domain, domain.make(Path()), task))
            assert [step.advantage for step in steps] == pytest.approx([0.0] * len(steps), abs=1e-12)


def test_tabular_policies_and_invalid_policies() -> None:
    table = {"s": {"A": 3.0, "b": 1.0, "refused": 4.0}}
    assert from_table(table)("s", 0, ("a", "b", "c")) == {"a": 3 / 8, "b": 1 / 8, "c": 0.0}
    assert from_table(table)("t", 0, ("a", "b")) == {"a": 0.5, "b": 0.5}
    task, settings = hand_task(hand_world()), KeydoorSettings(max_turns=2)
    for bad in ({"look": 1.5}, {"look": -0.1}, {"fly": 0.5}):
        with pytest.raises(ValueError, match="add up to at most 1"):
            ExactValues(task, settings, lambda key, turn, admissible, bad=bad: bad)
    with pytest.raises(ValueError, match="is over after 2 of 3 actions"):
        ExactValues(task, settings, uniform).episode(["look"] * 3)
