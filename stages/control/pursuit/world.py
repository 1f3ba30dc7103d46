"""Predators chase a fleeing prey on a grid with walls; many episodes side by side.

Every random draw belongs to an episode, a step and a player, whoever acts: coalitions that are compared see the same draws.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stages.control.pursuit.settings import Pursuit
from stages.seeding import key64

CATCH = 10.0
"""Reward of the team when a predator stands where the prey is, which then appears elsewhere."""
MOVES = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
Ints = NDArray[np.int64]


def team_returns(settings: Pursuit, coalition: int, episodes: int, *key: object) -> NDArray[np.float64]:
    """Returns [E] of the team in which the predators whose bits are set in `coalition` chase and the others are replaced."""
    count = len(settings.speeds)
    rng = np.random.default_rng(key64(settings.seed, "pursuit", *key))
    acting = np.array([coalition >> player & 1 == 1 for player in range(count)])
    able_to_chase = np.arange(count) != (-1 if settings.switched_off is None else settings.switched_off)
    predators = rng.integers(settings.size, size=(episodes, count, 2))
    prey = rng.integers(settings.size, size=(episodes, 2))
    total = np.zeros(episodes)
    for _ in range(settings.steps):
        draws, spots = rng.random((episodes, count, 5)), rng.integers(settings.size, size=(2, episodes, 2))
        flight = rng.random((episodes, 2 + len(MOVES)))
        for turn in range(2):  # a speed above 1 is one move and the chance of a second
            able = draws[:, :, turn] < np.array(settings.speeds) - turn
            wanted = chase(predators, prey, draws[:, :, 2]) * able_to_chase[:, None]
            replaced = replacement(settings.replacement, wanted, draws[:, :, 3], draws[:, :, 4])
            chosen = np.where(acting[:, None], wanted, replaced)
            predators = (predators + np.where(able[:, :, None], chosen, 0)).clip(0, settings.size - 1)
            caught = (predators == prey[:, None]).all(2).any(1)
            total += CATCH * caught
            prey = np.where(caught[:, None], spots[turn], prey)
        moving = flight[:, 0] < settings.prey_speed
        prey = np.where(moving[:, None], flee(predators, prey, settings.size, flight[:, 2:]), prey)
    return total


def chase(predators: Ints, prey: Ints, draw: NDArray[np.float64]) -> Ints:
    """Moves [E, N, 2] that shorten the longer of both distances; of equal ones, a random one. draw: [E, N]."""
    gap = prey[:, None] - predators
    along = np.abs(gap)
    second = (along[:, :, 1] > along[:, :, 0]) | ((along[:, :, 1] == along[:, :, 0]) & (draw < 0.5))
    axis = second.astype(np.int64)[:, :, None] == np.arange(2)
    return np.sign(gap) * axis


def replacement(kind: str, wanted: Ints, draw: NDArray[np.float64], other: NDArray[np.float64]) -> Ints:
    """Moves [E, N, 2] of predators that do not act. wanted: what each would do; draw, other: [E, N]."""
    if kind == "noop":
        return np.zeros_like(wanted)
    if kind == "random":
        return MOVES[(draw * len(MOVES)).astype(np.int64)]
    count = wanted.shape[1]
    chosen = (np.arange(count) + 1 + (other * (count - 1)).astype(np.int64)) % count
    return wanted[np.arange(len(wanted))[:, None], chosen]


def flee(predators: Ints, prey: Ints, size: int, draw: NDArray[np.float64]) -> Ints:
    """The cell [E, 2], a neighbour or the own, farthest from the nearest predator; draw [E, 5] decides between equal ones."""
    cells = (prey[:, None] + MOVES).clip(0, size - 1)
    distance = np.abs(cells[:, :, None] - predators[:, None]).sum(3).min(2)
    return cells[np.arange(len(prey)), (distance + 0.5 * draw).argmax(1)]
