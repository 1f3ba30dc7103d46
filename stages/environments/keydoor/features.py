"""Keydoor's states and actions as numbers, for a learnt model of it.

A state is: the agent's room, what is held, which doors are open (a 1 at the place of each), and whether the world is won. Rooms
are numbered from the start outwards and items in the order they are needed, so that a place means the same in every world.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from stages.environments.keydoor.environment import KeydoorState
from stages.environments.keydoor.world import State, World
from stages.environments.learnt import Vector
from stages.records.actions import action_key
from stages.records.task import Task

VERBS = ("look", "go", "unlock", "take", "drop")
BITS = 6
"""Of an action: whether its room is next to the agent's, whether that room's door is open, whether the key to it is held; whether
its item is here or held; whether the agent is in the first room."""


@dataclass(frozen=True)
class Places:
    """The numbers of a world's rooms and items."""

    world: World
    rooms: dict[str, int]
    items: dict[str, int]

    @classmethod
    def of(cls, world: World) -> Places:
        depth = {world.start: 0}
        for _ in world.back:
            depth |= {room: depth[back] + 1 for room, back in world.back.items() if back in depth}
        rooms = sorted(depth, key=lambda room: (depth[room], room in world.locks, room))
        needed = [world.locks[room] for room in rooms if room in world.locks]
        items = [*needed, world.thing, *sorted(set(world.places) - {*needed, world.thing})]
        return cls(world, {room: place for place, room in enumerate(rooms)}, {item: place for place, item in enumerate(items)})


@dataclass
class KeydoorFeatures:
    """For worlds of at most `rooms` rooms and `items` keys and things, played for at most `max_turns`."""

    rooms: int
    items: int
    max_turns: int
    _places: dict[str, Places] = field(default_factory=dict)

    @classmethod
    def of(cls, tasks: Iterable[Task], max_turns: int) -> KeydoorFeatures:
        """For the worlds of these tasks. Raises ValueError without any."""
        sizes = [(1 + len(task.spec["back"]), len(task.spec["contents"])) for task in tasks]
        if not sizes:
            raise ValueError("a model of keydoor needs tasks; raise curate.train")
        return cls(max(rooms for rooms, _ in sizes), max(items for _, items in sizes), max_turns)

    @property
    def states(self) -> int:
        return 2 * self.rooms + self.items + 1

    @property
    def context(self) -> int:
        return self.items * self.rooms + self.rooms * 2 + 2

    @property
    def actions(self) -> int:
        return len(VERBS) + 1 + self.rooms + self.items + BITS + self.context

    def places(self, task: Task) -> Places:
        if task.task_id not in self._places:
            self._places = {task.task_id: Places.of(World.from_spec(task.spec))}
        return self._places[task.task_id]

    def state(self, task: Task, snapshot: KeydoorState) -> Vector:
        return self.encoded(self.places(task), snapshot.world)

    def action(self, task: Task, snapshot: KeydoorState, text: str) -> Vector:
        return self.taken(self.places(task), snapshot.world, snapshot.turns, text)

    def same(self, task: Task, snapshot: KeydoorState, predicted: Vector) -> bool:
        return self.decoded(self.places(task), predicted) == snapshot.world

    def encoded(self, places: Places, state: State) -> Vector:
        """[states]."""
        room, held, opened = self._marks(self.rooms), self._marks(self.items), self._marks(self.rooms)
        room[places.rooms[state.room]] = 1.0
        held[[places.items[item] for item in state.held]] = 1.0
        opened[[places.rooms[name] for name in state.opened]] = 1.0
        return np.concatenate([room, held, opened, [float(state.won)]]).astype(np.float32)

    def decoded(self, places: Places, vector: Vector) -> State:
        """The nearest state: the likeliest room of the world, and everything else that is above 1/2."""
        room, held, opened = np.split(vector[:-1], [self.rooms, self.rooms + self.items])
        names = list(places.rooms)
        return State(
            names[int(room[: len(names)].argmax())],
            frozenset(item for item, place in places.items.items() if held[place] > 0.5),
            frozenset(name for name in places.world.locks if opened[places.rooms[name]] > 0.5),
            bool(vector[-1] > 0.5),
        )

    def taken(self, places: Places, state: State, turns: int, text: str) -> Vector:
        """[actions]."""
        world, (verb, _, name) = places.world, action_key(text).partition(" ")
        verbs, room, item = self._marks(len(VERBS) + 1), self._marks(self.rooms), self._marks(self.items)
        verbs[VERBS.index(verb) if verb in VERBS else len(VERBS)] = 1.0
        to = next((one for one in places.rooms if one.lower() == name), None)
        thing = next((one for one in places.items if one.lower() == name), None)
        bits = [False] * BITS
        if to is not None:
            room[places.rooms[to]] = 1.0
            near = to in world.onward[state.room] or world.back.get(state.room) == to
            bits[:3] = [near, world.is_open(state, to), world.locks.get(to) in state.held]
        if thing is not None:
            item[places.items[thing]] = 1.0
            bits[3:5] = [world.item_here(state) == thing, thing in state.held]
        bits[5] = state.room == world.start
        return np.concatenate([verbs, room, item, bits, self._world(places, turns)]).astype(np.float32)

    def _world(self, places: Places, turns: int) -> Vector:
        """[context]: where things are at the start, which rooms are locked, how far each is, and the time."""
        world = places.world
        where = np.zeros((self.items, self.rooms), np.float32)
        for item, room in world.places.items():
            where[places.items[item], places.rooms[room]] = 1.0
        locked, back = self._marks(self.rooms), self._marks(self.rooms)
        locked[[places.rooms[room] for room in world.locks]] = 1.0
        for room, before in world.back.items():
            back[places.rooms[room]] = (places.rooms[before] + 1) / self.rooms
        return np.concatenate([where.ravel(), locked, back, [float(world.deliver), turns / self.max_turns]])

    @staticmethod
    def _marks(count: int) -> Vector:
        return np.zeros(count, np.float32)
