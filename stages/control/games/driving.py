"""Two cars whose lanes merge: a small Markov game, and the table of values that a new driver learns by.

Each car has a place and a speed of 0 to MOST cells per step; an action changes the speed by -1, 0 or 1. From MERGE on both share
a lane, where they crash if they are less than LENGTH cells apart or one drives through the other. A step pays the car's speed, a
crash costs both CRASH and ends the episode. Many episodes are played side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Array = NDArray[np.float64]
Driver = Callable[[Ints, np.random.Generator], Ints]
"""What the driver knows [E] (`known`) -> actions [E]."""

BRAKE, KEEP, ACCELERATE = range(3)
STEPS, MERGE, LENGTH, MOST, CRASH = 15, 6, 2, 2, 20.0
STARTS = 3
"""Cells at the start of each lane where a car can begin, at speed 1."""
GAP = 4
"""The distance to the other car is known up to this."""
KNOWN = (MERGE + 1) * (MOST + 1) * (2 * GAP + 1) * (MOST + 1)


def known(place: Ints, speed: Ints) -> Ints:
    """What each driver knows, a number below KNOWN, [E, 2] of places and speeds [E, 2]: the own way to the merge and speed, the
    distance to the other car and its speed."""
    gap = (place[:, ::-1] - place).clip(-GAP, GAP) + GAP
    found = place.clip(max=MERGE) * (MOST + 1) + speed
    return (found * (2 * GAP + 1) + gap) * (MOST + 1) + speed[:, ::-1]


def crashed(before: Ints, after: Ints) -> Flags:
    """[E], of both cars' places [E, 2] before and after a step."""
    gap, shared = after[:, 0] - after[:, 1], (after >= MERGE).all(1)
    through = (before >= MERGE).all(1) & ((before[:, 0] - before[:, 1]) * gap < 0)
    return shared & (np.abs(gap) < LENGTH) | through


@dataclass(frozen=True)
class Episodes:
    """E episodes as they were driven, [STEPS, E, 2] each: what the drivers knew, what they did, what it paid."""

    known: Ints
    actions: Ints
    rewards: Array
    going: Flags
    """[STEPS, E]: no crash came before this step."""
    crash: Flags
    """[E]."""

    @property
    def returns(self) -> Array:
        """[E, 2]."""
        return self.rewards.sum(0)


def drive(drivers: tuple[Driver, Driver], episodes: int, rng: np.random.Generator) -> Episodes:
    """Play episodes of both drivers."""
    place, speed = rng.integers(STARTS, size=(episodes, 2)), np.ones((episodes, 2), np.int64)
    going, kept = np.ones(episodes, bool), []
    for _ in range(STEPS):
        knows = known(place, speed)
        actions = np.stack([driver(knows[:, player], rng) for player, driver in enumerate(drivers)], 1)
        speed = (speed + actions - 1).clip(0, MOST)
        before, place = place, place + speed
        crash = going & crashed(before, place)
        rewards = np.where(going[:, None], speed - CRASH * crash[:, None], 0.0)
        kept.append((knows, actions, rewards, going))
        going = going & ~crash
    knows, actions, rewards, were_going = (np.stack(part) for part in zip(*kept, strict=True))
    return Episodes(knows, actions, rewards, were_going, ~going)


def by_table(table: Ints) -> Driver:
    """The driver that does `table` [KNOWN]."""
    return lambda knows, rng: table[knows]


def aggressive(knows: Ints, rng: np.random.Generator) -> Ints:
    """Always accelerates."""
    return np.full(len(knows), ACCELERATE)


def erratic(knows: Ints, rng: np.random.Generator) -> Ints:
    """Acts at random."""
    return rng.integers(3, size=len(knows))


def mixture(drivers: list[Driver], weights: Array) -> Driver:
    """One driver, drawn anew for each episode by `weights`. Begins with the first step of a batch of episodes: use a new one for
    every batch."""
    chosen: list[Ints] = []

    def act(knows: Ints, rng: np.random.Generator) -> Ints:
        if not chosen:
            chosen.append(rng.choice(len(drivers), size=len(knows), p=weights))
        actions = np.stack([driver(knows, rng) for driver in drivers])
        return actions[chosen[0], np.arange(len(knows))]

    return act


class Values:
    """Returns to come [KNOWN, 3] of what a driver knows and does, averaged over all episodes that it was in."""

    def __init__(self) -> None:
        self.sums, self.counts = np.zeros((KNOWN, 3)), np.zeros((KNOWN, 3))

    def greedy(self) -> Ints:
        """[KNOWN]; ties, such as where nothing is known, go to keeping the speed, then to braking."""
        values = self.sums / np.maximum(self.counts, 1.0)
        return np.array([KEEP, BRAKE, ACCELERATE])[values[:, [KEEP, BRAKE, ACCELERATE]].argmax(1)]

    def exploring(self, exploration: float) -> Driver:
        table = self.greedy()

        def act(knows: Ints, rng: np.random.Generator) -> Ints:
            return np.where(rng.random(len(knows)) < exploration, rng.integers(3, size=len(knows)), table[knows])

        return act

    def learn(self, episodes: Episodes, player: int, credit: Array, rate: float) -> None:
        """Average in the player's episodes; `credit` [E] is paid at their end. rate: weight of the past is 1 - rate."""
        ahead = episodes.rewards[::-1, :, player].cumsum(0)[::-1] + credit
        where = episodes.known[:, :, player][episodes.going], episodes.actions[:, :, player][episodes.going]
        self.sums *= 1.0 - rate
        self.counts *= 1.0 - rate
        np.add.at(self.sums, where, ahead[episodes.going])
        np.add.at(self.counts, where, 1.0)
