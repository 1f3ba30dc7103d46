"""A courier in a town where roads are closed: walk to the door, and never into a closed road."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.plugins import (
    Count,
    DomainSettings,
    Observation,
    RecipeDomain,
    Step,
    Task,
    ValueEnvironment,
    check_fields,
    splits_in_turn,
    stream,
)


class CourierSettings(DomainSettings):
    """per_domain.courier.environment in params.yaml."""

    blocks: Count = 4
    """The door is at most this many blocks to the east, and as many to the north."""


@dataclass(frozen=True)
class CourierState:
    """Everything that changes during an episode."""

    task_id: str
    east: int
    north: int
    turns: int = 0
    over: bool = False


class CourierEnvironment(ValueEnvironment[CourierState]):
    name = "courier"

    def _start(self, task: Task) -> tuple[CourierState, str]:
        self._roads = task.spec["roads"]
        state = CourierState(task.task_id, task.spec["east"], task.spec["north"])
        return state, self._view(state)

    def _closed(self, state: CourierState) -> str:
        """The road that is closed here. If only one direction leads on, it is the other one."""
        if not state.east or not state.north:
            return "north" if state.east else "east"
        return str(stream("courier", self._roads, state.east, state.north).choice(["east", "north"]))

    def _view(self, state: CourierState) -> str:
        return f"{state.east} blocks east, {state.north} blocks north. Closed: {self._closed(state)}."

    def step(self, action: str) -> Step:
        before = self._running()
        accepted = action.strip() in self.admissible()
        after = replace(before, turns=before.turns + 1)
        if accepted:
            after = replace(after, **{action.strip(): getattr(before, action.strip()) - 1})
        won = not after.east and not after.north
        truncated = not won and (not accepted or after.turns >= self._max_turns)
        self._state = replace(after, over=won or truncated)
        text = "Delivered." if won else self._view(after) if accepted else "That road is closed. The parcel is lost."
        return Step(Observation(text), float(won), accepted, terminated=won, truncated=truncated)

    def state_key(self) -> str:
        return f"{self.task.task_id}#{self._state.east} {self._state.north} {self._state.over}"

    def admissible(self) -> Sequence[str]:
        if self._state.over:
            return []
        return [way for way in ("east", "north") if way != self._closed(self._state)]

    def next_action(self) -> str | None:
        return next(iter(self.admissible()), None)


RENDERER = """
viewer.renderer("courier", {
  name: "street map",
  draw: function (episode, turn, element) {
    const places = [-1].concat(Array.from(Array(turn + 1).keys())).map(function (number) {
      return /(\\d+) blocks east, (\\d+) blocks north/.exec(viewer.said(episode, number));
    }).filter(Boolean);
    const rooms = {}, ways = [];
    places.forEach(function (place, number) {
      rooms["corner " + (number + 1)] = { x: -Number(place[1]), y: Number(place[2]), lines: [], seen: true };
      if (number) ways.push(["corner " + number, "corner " + (number + 1)]);
    });
    rooms.door = { x: 0, y: 0, lines: [], seen: /^Delivered/.test(viewer.said(episode, turn)) };
    return viewer.map(rooms, ways, rooms.door.seen ? "door" : "corner " + places.length, "The way to the door");
  }
});
"""
"""Draws the way so far in the viewer of episodes; see docs/extending.md."""


class CourierDomain(RecipeDomain[CourierSettings]):
    name = "courier"
    Settings = CourierSettings
    renderer = RENDERER

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        for split, index in splits_in_turn(count):
            rng, most = stream("courier", seed, split, index), self.settings.blocks
            place = {"east": rng.randint(1, most), "north": rng.randint(1, most), "roads": rng.randrange(2**31)}
            yield {"task_id": f"courier-{split}-{index:05d}", "split": split, **place}

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, {"task_id": str, "split": str, "east": int, "north": int, "roads": int})
        if record["east"] < 1 or record["north"] < 1:
            raise ValueError("'east' and 'north' must be at least 1")

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        return Task(
            task_id=record["task_id"],
            domain=self.name,
            split=record["split"],
            seed=record["roads"],
            prompt="Bring the parcel to the door. Each turn, write east or north.",
            spec={name: record[name] for name in ("east", "north", "roads")},
            difficulty=float(record["east"] + record["north"]),
            cluster=record["task_id"],
        )

    def make(self, folder: Path) -> CourierEnvironment:
        return CourierEnvironment(self.settings.max_turns)

    def entities(self, task: Task) -> set[str]:
        return {task.task_id}
