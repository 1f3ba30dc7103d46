"""Episodes of the keydoor domain: actions, observations, rewards, limits, states and the expert."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from keydoor_worlds import LEVELS, hand_task, hand_world, play, solution

from stages.environments.keydoor import KeydoorDomain, KeydoorSettings
from stages.environments.keydoor.environment import NOTHING, WON
from stages.environments.keydoor.world import State, World
from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.records.task import Task


@pytest.fixture(scope="module")
def domain() -> KeydoorDomain:
    return KeydoorDomain(KeydoorSettings(levels=LEVELS))


def test_implements_domain_and_environment_protocols(domain: KeydoorDomain, tmp_path: Path) -> None:
    assert isinstance(domain, Domain)
    assert isinstance(domain.make(tmp_path), Environment)
    assert load_domain("keydoor", {"clues": False}).settings == KeydoorSettings(clues=False)


def test_episode_by_hand(domain: KeydoorDomain, tmp_path: Path) -> None:
    """Every action, its observation and the count of sub-goals."""
    environment = domain.make(tmp_path)
    assert environment.reset(hand_task(hand_world())).text == "you are in Balbas. exits Corbis."
    expected = [
        ("go Corbis", "you are in Corbis. exits Dorvin, Kelmar. back Balbas. Selmak needs iron key.", 0),
        ("go Dorvin", "you are in Dorvin. back Corbis. here is iron key.", 0),
        ("take iron key", "taken. you are in Dorvin. back Corbis. you hold iron key.", 1),
        ("GO  corbis", "you are in Corbis. exits Dorvin, Kelmar. back Balbas. you hold iron key. iron key fits Selmak.", 1),
        ("unlock Selmak", "unlocked. you are in Corbis. exits Dorvin, Kelmar, Selmak. back Balbas.", 2),
        ("go Selmak", "you are in Selmak. back Corbis. here is lamp.", 2),
        ("take lamp", WON, 3),
    ]
    total = 0.0
    for action, text, reached in expected:
        step = environment.step(action)
        total += step.terms["subgoals"]
        assert (step.observation.text, step.accepted) == (text, True)
        assert total == pytest.approx(reached / 3)
        assert (step.reward, step.terminated, step.truncated) == (float(text == WON), text == WON, False)
    assert environment.admissible() == []
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("look")


def test_admissible_and_refused_actions_by_hand(domain: KeydoorDomain, tmp_path: Path) -> None:
    """Doors need their key, decoys open none, and a used key stays in its lock."""
    environment = domain.make(tmp_path)
    play(environment, hand_task(hand_world()), ["go Corbis"])
    assert environment.admissible() == ["go Balbas", "go Dorvin", "go Kelmar", "look"]
    for refused in ("go Selmak", "unlock Selmak", "take iron key", "go Corbis", "drop lamp", "dance", ""):
        step = environment.step(refused)
        assert (step.accepted, step.reward) == (False, 0.0)
        assert step.observation.text == f"{NOTHING} you are in Corbis. exits Dorvin, Kelmar. back Balbas. Selmak needs iron key."
    play(environment, hand_task(hand_world()), ["go Corbis", "go Kelmar", "take wax key", "go Corbis"])
    assert "unlock Selmak" not in environment.admissible()
    play(environment, hand_task(hand_world()), ["go Corbis", "go Dorvin", "take iron key", "go Corbis", "unlock Selmak"])
    assert environment.snapshot().world == State("Corbis", frozenset(), frozenset({"Selmak"}))
    environment.step("go Dorvin")
    assert environment.admissible() == ["go Corbis", "look"]


def test_delivery_by_hand(domain: KeydoorDomain, tmp_path: Path) -> None:
    world = World("Balbas", {"Corbis": "Balbas"}, {}, {"Corbis": "lamp"}, "lamp", True)
    environment = domain.make(tmp_path)
    steps = play(environment, hand_task(world), ["go Corbis", "take lamp", "go Balbas", "drop lamp"])
    assert [step.terms["subgoals"] for step in steps] == [0.0, 0.5, 0.0, 0.5]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 1.0]
    play(environment, hand_task(world), ["go Corbis", "take lamp"])
    assert "drop lamp" not in environment.admissible()


def test_expert_takes_the_shortest_path(domain: KeydoorDomain, tasks: list[Task], tmp_path: Path) -> None:
    environment = domain.make(tmp_path)
    for task in tasks:
        actions = solution(domain, environment, task)
        assert len(actions) == task.difficulty
        assert environment.snapshot().world.won


def test_expert_recovers_from_any_state(domain: KeydoorDomain, tasks: list[Task], tmp_path: Path) -> None:
    environment = KeydoorDomain(KeydoorSettings(levels=LEVELS, max_turns=64)).make(tmp_path)
    for index, task in enumerate(tasks[:24]):
        rng = Random(index)
        environment.reset(task)
        for _ in range(12):
            if environment.admissible():
                environment.step(rng.choice(list(environment.admissible())))
        left = environment._world.distances[environment.snapshot().world]
        taken = 0
        while (action := domain.expert(environment)) is not None:
            environment.step(action)
            taken += 1
        assert taken == left


def test_progress_reward_sums_to_one(tasks: list[Task], tmp_path: Path) -> None:
    domain = KeydoorDomain(KeydoorSettings(levels=LEVELS, progress_reward=0.5))
    environment = domain.make(tmp_path)
    for task in tasks:
        steps = play(environment, task, solution(domain, environment, task))
        assert sum(step.reward for step in steps) == pytest.approx(1.0, abs=1e-12)
        assert sum(step.terms["subgoals"] for step in steps) == pytest.approx(1.0)
        assert min(step.terms["subgoals"] for step in steps) >= 0.0
    steps = play(environment, hand_task(hand_world()), ["go Corbis", "go Dorvin", "take iron key", "look"])
    assert [step.reward for step in steps] == pytest.approx([0.0, 0.0, 0.5 / 3, 0.0])


def test_turn_limit_truncates_unless_last_turn_wins(domain: KeydoorDomain, tasks: list[Task], tmp_path: Path) -> None:
    task = next(task for task in tasks if task.difficulty == 3.0)
    environment = KeydoorDomain(KeydoorSettings(max_turns=3)).make(tmp_path)
    step = play(environment, task, solution(domain, environment, task))[-1]
    assert (step.terminated, step.truncated, step.reward) == (True, False, 1.0)
    step = play(environment, task, ["look", "look", "look"])[-1]
    assert (step.terminated, step.truncated, step.reward) == (False, True, 0.0)
    assert environment.admissible() == []
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("look")


def test_restored_snapshot_continues_identically(domain: KeydoorDomain, tasks: list[Task], tmp_path: Path) -> None:
    task = next(task for task in tasks if task.difficulty == max(task.difficulty for task in tasks))
    actions = solution(domain, domain.make(tmp_path), task)
    environment, other = domain.make(tmp_path), domain.make(tmp_path)
    play(environment, task, actions[:4])
    state, key = environment.snapshot(), environment.state_key()
    first = [environment.step(action) for action in ("look", "nonsense", *actions[4:])]
    other.reset(task)
    other.restore(state)
    assert other.state_key() == key
    assert [other.step(action) for action in ("look", "nonsense", *actions[4:])] == first
    environment.reset(tasks[0])
    with pytest.raises(ValueError, match="can't be restored"):
        environment.restore(state)


def test_state_keys_are_canonical(domain: KeydoorDomain, tmp_path: Path) -> None:
    """Contract: a state's key depends neither on the path to it nor on the turn; different states have different keys."""
    environment, keys = domain.make(tmp_path), []
    for actions in (
        ["go Corbis", "go Dorvin", "take iron key", "go Corbis", "go Kelmar", "take wax key", "go Corbis"],
        ["go Corbis", "go Kelmar", "look", "take wax key", "go Corbis", "nonsense", "go Dorvin", "take iron key", "go Corbis"],
    ):
        play(environment, hand_task(hand_world()), actions)
        keys.append(environment.state_key())
    assert keys[0] == keys[1] == "hand#Corbis|iron key wax key||"
    world = hand_world()
    assert len({state.key for state in world.states}) == len(world.states)
