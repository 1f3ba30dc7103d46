"""The world as pure functions: the possible actions in a state, their results, and the text that describes it.

Rooms form a tree rooted at the start. A corridor leads to a fork with open side rooms and one locked door; behind the door is the
next fork, and behind the last door the thing. Without doors the thing is in a side room.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from stages.environments.keydoor.settings import Level
from stages.environments.search.world import names_of
from stages.records.actions import action_key
from stages.records.task import Split
from stages.seeding import stream

KEYS = ("chalk", "clay", "glass", "gold", "iron", "oak", "silk", "stone", "tin", "wax")
"""Materials of keys: common words, as the things are. Rooms have the encyclopaedia's names for the split: test names are unseen
in training, but each of their syllables is not."""
THINGS = ("bell", "book", "coin", "cup", "drum", "jar", "lamp", "ring", "rope", "vase")


@dataclass(frozen=True)
class State:
    """Everything that actions change in a world."""

    room: str
    held: frozenset[str] = frozenset()
    """Keys and things that the agent carries; a used key stays in its lock."""
    opened: frozenset[str] = frozenset()
    """Rooms whose door was unlocked."""
    won: bool = False

    @property
    def key(self) -> str:
        """Equal for equal states."""
        return "|".join((self.room, " ".join(sorted(self.held)), " ".join(sorted(self.opened)), "won" if self.won else ""))


@dataclass(frozen=True)
class World:
    """One world, with locks and contents as they are at the start."""

    start: str
    back: Mapping[str, str]
    """Room -> the room one step nearer to the start; without the start."""
    locks: Mapping[str, str]
    """Room behind a locked door -> the key that fits."""
    contents: Mapping[str, str]
    """Room -> the key or thing in it."""
    thing: str
    deliver: bool

    @cached_property
    def onward(self) -> dict[str, tuple[str, ...]]:
        """Room -> the rooms one step farther from the start, sorted."""
        rooms = [self.start, *self.back]
        return {room: tuple(sorted(other for other in self.back if self.back[other] == room)) for room in rooms}

    @cached_property
    def places(self) -> dict[str, str]:
        """Key or thing -> its room."""
        return {item: room for room, item in self.contents.items()}

    @cached_property
    def subgoals(self) -> int:
        """Number of sub-goals: keys that fit a door, doors, the thing, and its delivery."""
        return 2 * len(self.locks) + 1 + self.deliver

    def initial(self) -> State:
        return State(self.start)

    def is_open(self, state: State, room: str) -> bool:
        return room not in self.locks or room in state.opened

    def item_here(self, state: State) -> str | None:
        """The key or thing on the floor of the agent's room."""
        item = self.contents.get(state.room)
        used = {self.locks[room] for room in state.opened}
        return None if item is None or item in state.held or item in used else item

    def moves(self, state: State) -> dict[str, State]:
        """Every possible action -> the next state, sorted; empty once the world is won."""
        if state.won:
            return {}
        found = {"look": state}
        if state.room in self.back:
            found[f"go {self.back[state.room]}"] = State(self.back[state.room], state.held, state.opened)
        for room in self.onward[state.room]:
            if self.is_open(state, room):
                found[f"go {room}"] = State(room, state.held, state.opened)
            elif self.locks[room] in state.held:
                found[f"unlock {room}"] = State(state.room, state.held - {self.locks[room]}, state.opened | {room})
        item = self.item_here(state)
        if item is not None:
            won = item == self.thing and not self.deliver
            found[f"take {item}"] = State(state.room, state.held | {item}, state.opened, won)
        if self.deliver and state.room == self.start and self.thing in state.held:
            found[f"drop {self.thing}"] = State(state.room, state.held - {self.thing}, state.opened, won=True)
        return dict(sorted(found.items()))

    def after(self, state: State, action: str) -> State | None:
        """The state after `action`, in any case and spacing; None if the action is not possible."""
        wanted = action_key(action)
        return next((after for name, after in self.moves(state).items() if name.lower() == wanted), None)

    def reached(self, state: State) -> int:
        """Number of sub-goals reached; it never decreases."""
        if state.won:
            return self.subgoals
        keys = sum(key in state.held for key in self.locks.values())
        return keys + 2 * len(state.opened) + (self.thing in state.held)

    @cached_property
    def states(self) -> dict[State, dict[str, State]]:
        """Every reachable state with its moves, in order of distance from the start."""
        found = {self.initial(): self.moves(self.initial())}
        waiting = deque(found)
        while waiting:
            for after in found[waiting.popleft()].values():
                if after not in found:
                    found[after] = self.moves(after)
                    waiting.append(after)
        return found

    @cached_property
    def distances(self) -> dict[State, int]:
        """State -> number of actions of the shortest way to win."""
        before: dict[State, list[State]] = {state: [] for state in self.states}
        for state, moves in self.states.items():
            for after in moves.values():
                before[after].append(state)
        distances = {state: 0 for state in self.states if state.won}
        waiting = deque(distances)
        while waiting:
            state = waiting.popleft()
            for earlier in before[state]:
                if earlier not in distances:
                    distances[earlier] = distances[state] + 1
                    waiting.append(earlier)
        return distances

    def shortest(self, state: State) -> str | None:
        """The first action of the shortest way to win (of several, the first in order); None once the world is won."""
        moves = self.moves(state)
        return min(moves, key=lambda action: (self.distances[moves[action]], action), default=None)

    def describe(self, state: State) -> str:
        """What the agent reads in `state`: all of its surroundings, so that the state can be known without earlier text."""
        here = [room for room in self.onward[state.room] if self.is_open(state, room)]
        parts = [f"you are in {state.room}."]
        if here:
            parts.append(f"exits {', '.join(here)}.")
        if state.room in self.back:
            parts.append(f"back {self.back[state.room]}.")
        if state.held:
            parts.append(f"you hold {', '.join(sorted(state.held))}.")
        item = self.item_here(state)
        if item is not None:
            parts.append(f"here is {item}.")
        for room in self.onward[state.room]:
            if not self.is_open(state, room):
                fits = self.locks[room] in state.held
                parts.append(f"{self.locks[room]} fits {room}." if fits else f"{room} needs {self.locks[room]}.")
        return " ".join(parts)

    def to_spec(self) -> dict[str, Any]:
        """As plain JSON values."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> World:
        return cls(**{field.name: spec[field.name] for field in fields(cls)})


def make_world(split: Split, level: Level, seed: int) -> World:
    """The world that `seed` draws for `level`, with names of `split`; deterministic."""
    shape = (level.corridor, level.doors, level.side_rooms, level.decoys, level.deliver)
    rng = stream("keydoor.world", split, *shape, seed)
    names, keys, thing = rng.sample(names_of(split), level.rooms), rng.sample(KEYS, level.keys), rng.choice(THINGS)
    room = start = names.pop()
    back: dict[str, str] = {}
    locks: dict[str, str] = {}
    contents: dict[str, str] = {}
    for _ in range(level.corridor):
        onward = names.pop()
        back[onward] = room
        room = onward
    for _ in range(level.forks):
        side = [names.pop() for _ in range(level.side_rooms)]
        back |= dict.fromkeys(side, room)
        needed = f"{keys.pop()} key" if level.doors else thing
        items = [needed, *(f"{keys.pop()} key" for _ in range(level.decoys))]
        contents |= dict(zip(rng.sample(side, len(items)), items, strict=True))
        if level.doors:
            onward = names.pop()
            back[onward], locks[onward] = room, needed
            room = onward
    if level.doors:
        contents[room] = thing
    return World(start, back, locks, contents, thing, level.deliver)
