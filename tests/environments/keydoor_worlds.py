"""Levels and a hand-made world of the keydoor domain, and ways to play them."""

from __future__ import annotations

from stages.environments.keydoor import KeydoorDomain, KeydoorEnvironment
from stages.environments.keydoor.settings import WeightedLevel
from stages.environments.keydoor.world import World
from stages.records.task import Task

LEVELS = (
    WeightedLevel(corridor=1, doors=0, side_rooms=3),
    WeightedLevel(corridor=0, doors=1, side_rooms=2, decoys=1),
    WeightedLevel(corridor=2, doors=2, side_rooms=2, decoys=1),
    WeightedLevel(corridor=1, doors=1, side_rooms=1, deliver=True),
)


def hand_world() -> World:
    """A corridor of one room, a fork of two side rooms with a key and a decoy, and one door."""
    return World(
        start="Balbas",
        back={"Corbis": "Balbas", "Dorvin": "Corbis", "Kelmar": "Corbis", "Selmak": "Corbis"},
        locks={"Selmak": "iron key"},
        contents={"Dorvin": "iron key", "Kelmar": "wax key", "Selmak": "lamp"},
        thing="lamp",
        deliver=False,
    )


def hand_task(world: World) -> Task:
    return Task("hand", "keydoor", "train", 0, "Find lamp.", world.to_spec(), 6.0)


def play(environment: KeydoorEnvironment, task: Task, actions: list[str]) -> list:
    environment.reset(task)
    return [environment.step(action) for action in actions]


def solution(domain: KeydoorDomain, environment: KeydoorEnvironment, task: Task) -> list[str]:
    environment.reset(task)
    actions = []
    while (action := domain.expert(environment)) is not None:
        assert action in environment.admissible()
        actions.append(action)
        environment.step(action)
    return actions
