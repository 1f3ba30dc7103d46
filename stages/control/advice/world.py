"""A grid with a technology tree of eight achievements; many episodes side by side, described in numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Array = NDArray[np.float32]

RESOURCES = ("tree", "stone", "coal", "iron")
COUNTS = (6, 5, 3, 2)
"""Cells of each resource. Collecting leaves them where they are."""
THINGS = ("wood", "stone", "coal", "iron")
TOOLS = ("wood pickaxe", "stone pickaxe", "iron pickaxe")
ACTIONS = ("move west", "move east", "move north", "move south", "collect", "place table", *(f"make {tool}" for tool in TOOLS))
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
GOALS = (
    "collect wood",
    "place table",
    "make wood pickaxe",
    "collect stone",
    "make stone pickaxe",
    "collect coal",
    "collect iron",
    "make iron pickaxe",
)
"""The achievements, in an order in which they are possible; a step pays 1 for each that is new in the episode."""
COLLECT, TABLE, MAKE = 4, 5, 6
GOAL_OF_THING = (0, 3, 5, 6)
GOAL_OF_TOOL = (2, 4, 7)
COSTS = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1]])
"""[3, 4]: things that a tool takes. The table takes one wood."""
NEEDED_TOOL = (-1, 0, 0, 1)
"""The tool that a resource needs; -1: none."""
MOST = 9
"""Of a thing that the agent can carry."""


@dataclass
class Grid:
    """E episodes. `resource` [E, S, S]: 0, or 1 + the resource of a cell; `table` [E, 2], -1 before it is placed."""

    position: Ints
    resource: Ints
    table: Ints
    things: Ints
    """[E, 4]."""
    tools: Flags
    """[E, 3]."""
    done: Flags
    """[E, 8]: achieved in this episode."""
    steps: Ints
    """[E]."""

    @classmethod
    def new(cls, count: int, size: int, rng: np.random.Generator) -> Grid:
        grid = cls(
            np.zeros((count, 2), np.int64),
            np.zeros((count, size, size), np.int64),
            np.full((count, 2), -1),
            np.zeros((count, 4), np.int64),
            np.zeros((count, 3), bool),
            np.zeros((count, 8), bool),
            np.zeros(count, np.int64),
        )
        grid.reset(np.ones(count, bool), rng)
        return grid

    def reset(self, which: Flags, rng: np.random.Generator) -> None:
        """Begin new episodes, each on a map of its own. Draws for all E: no episode's depend on the others' ends."""
        count, size = len(which), self.resource.shape[1]
        cells = rng.random((count, size * size)).argsort(1)[:, : sum(COUNTS)]
        flat = np.zeros((count, size * size), np.int64)
        np.put_along_axis(flat, cells, np.repeat(np.arange(1, 5), COUNTS)[None].repeat(count, 0), 1)
        starts = rng.integers(size, size=(count, 2))
        self.resource[which], self.position[which] = flat.reshape(count, size, size)[which], starts[which]
        self.table[which] = -1
        for array in (self.things, self.tools, self.done, self.steps):
            array[which] = 0

    def near_table(self) -> Flags:
        """[E]: the table stands here or on a neighbouring cell."""
        return (self.table[:, 0] >= 0) & (np.abs(self.table - self.position).max(1) <= 1)

    def here(self) -> Ints:
        """[E]: 1 + the resource of the agent's cell, or 0."""
        return self.resource[np.arange(len(self.position)), self.position[:, 0], self.position[:, 1]]

    def step(self, actions: Ints) -> Flags:
        """Take actions [E]; returns the achievements that are new, [E, 8]."""
        rows, before = np.arange(len(actions)), self.done.copy()
        moves = np.concatenate([MOVES, np.zeros((len(ACTIONS) - len(MOVES), 2), np.int64)])[actions]
        size, near = self.resource.shape[1], self.near_table()
        self.position = (self.position + moves).clip(0, size - 1)
        resource = self.here() - 1
        tool = np.array(NEEDED_TOOL)[resource]
        able = (tool < 0) | self.tools[rows, tool.clip(0)]
        collects = (actions == COLLECT) & (resource >= 0) & able
        self.things[rows[collects], resource[collects]] += 1
        self.things = self.things.clip(0, MOST)
        self.done[rows[collects], np.array(GOAL_OF_THING)[resource[collects]]] = True
        places = (actions == TABLE) & (self.things[:, 0] > 0) & (self.table[:, 0] < 0)
        self.things[places, 0] -= 1
        self.table[places] = self.position[places]
        self.done[places, 1] = True
        for made in range(3):
            makes = (actions == MAKE + made) & near & (self.things >= COSTS[made]).all(1)
            self.things[makes] -= COSTS[made]
            self.tools[makes, made] = True
            self.done[makes, GOAL_OF_TOOL[made]] = True
        self.steps += 1
        return self.done & ~before

    def missing(self) -> Ints:
        """[E]: the goal to pursue next: the first that is not achieved, or what it lacks."""
        first = np.where(self.done.all(1), len(GOALS) - 1, (~self.done).argmax(1))
        found = first.copy()
        found[(first == 1) & (self.things[:, 0] == 0)] = 0
        for made, goal in enumerate(GOAL_OF_TOOL):
            for thing in reversed(range(4)):
                found[(first == goal) & (self.things[:, thing] < COSTS[made, thing])] = GOAL_OF_THING[thing]
        return found

    def nearest(self) -> tuple[Ints, Flags]:
        """From the agent to the nearest cell of each resource and to the table: [E, 5, 2], and whether there is one [E, 5]."""
        count, size = len(self.position), self.resource.shape[1]
        cells = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), -1)
        distance = np.abs(cells[None] - self.position[:, None, None]).sum(-1).reshape(count, -1)
        gaps, exists = np.zeros((count, 5, 2), np.int64), np.ones((count, 5), bool)
        for kind in range(4):
            masked = np.where(self.resource.reshape(count, -1) == kind + 1, distance, 10 * size)
            gaps[:, kind] = cells.reshape(-1, 2)[masked.argmin(1)] - self.position
        exists[:, 4] = self.table[:, 0] >= 0
        gaps[:, 4] = np.where(exists[:, 4, None], self.table - self.position, 0)
        return gaps, exists

    def observation(self, own: bool = True) -> Array:
        """[E, OBSERVATION]: where the nearest things are, what is here; then the agent's own inventory, tools and achievements of
        the episode, or zeros."""
        gaps, exists = self.nearest()
        on_it = (gaps == 0).all(2) & exists
        parts = (gaps.reshape(len(gaps), -1) / 4.0, on_it, exists[:, 4:], self.near_table()[:, None])
        possessions = np.concatenate([self.things / 3.0, self.things > 0, self.tools, self.done], 1)
        return np.concatenate([*parts, possessions * own], 1).astype(np.float32)


OBSERVATION = 10 + 5 + 1 + 1 + 4 + 4 + 3 + 8


def seen(grid: Grid, row: int) -> str:
    """What the adviser reads of the surroundings."""
    gaps, exists = (each[row] for each in grid.nearest())
    found = []
    for name, (right, down), there in zip((*RESOURCES, "table"), gaps.tolist(), exists.tolist(), strict=True):
        if there:
            way = [f"{abs(right)} {'east' if right > 0 else 'west'}"] if right else []
            way += [f"{abs(down)} {'south' if down > 0 else 'north'}"] if down else []
            found.append(f"{name} {' '.join(way) or 'here'}")
    return ", ".join(found)


def carried(grid: Grid, row: int) -> str:
    """The inventory, as the adviser reads it."""
    things = [f"{count} {name}" for name, count in zip(THINGS, grid.things[row].tolist(), strict=True) if count]
    tools = [name for name, has in zip(TOOLS, grid.tools[row].tolist(), strict=True) if has]
    return ", ".join([*things, *tools]) or "nothing"
