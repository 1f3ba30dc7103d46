"""Settings of the keydoor domain (per_domain.keydoor.environment in params.yaml), and its raw records."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from stages.environments.protocol import DomainSettings
from stages.records.task import Split
from stages.runtime.validation import Checked

MAX_KEYS = 10
"""Number of different keys (world.KEYS)."""


class Level(Checked):
    """The size of a world. Larger numbers make the shortest solution longer or add wrong turns."""

    corridor: Annotated[int, Field(ge=0, le=8)]
    """Rooms in a row before the first fork, without a choice but to go on or back."""
    doors: Annotated[int, Field(ge=0, le=4)]
    """Locked doors, one after another; the key to each is in a side room before it."""
    side_rooms: Annotated[int, Field(ge=1, le=4)] = 2
    """Side rooms at each fork; one of them contains what is needed."""
    decoys: Annotated[int, Field(ge=0, le=3)] = 0
    """Other side rooms at each fork with a key that fits no door."""
    deliver: bool = False
    """The thing must be brought back to the first room."""

    @model_validator(mode="after")
    def _fits(self) -> Level:
        if self.decoys >= self.side_rooms:
            raise ValueError(f"{self.decoys} decoys do not fit: one of the {self.side_rooms} side rooms has what is needed")
        if self.keys > MAX_KEYS:
            raise ValueError(f"{self.keys} keys are needed, but there are only {MAX_KEYS}; use fewer doors or decoys")
        return self

    @property
    def forks(self) -> int:
        return max(self.doors, 1)

    @property
    def rooms(self) -> int:
        return 1 + self.corridor + self.forks * self.side_rooms + self.doors

    @property
    def keys(self) -> int:
        return self.doors + self.forks * self.decoys

    @property
    def solution_length(self) -> int:
        """Actions of the shortest solution. Per door: go to the key, take it, go back, unlock, go through."""
        way = self.corridor + (5 * self.doors if self.doors else 1)
        back = self.corridor + max(self.doors, 1) + 1 if self.deliver else 0
        return way + 1 + back


class WeightedLevel(Level):
    """A level and its weight in recipes and in curation."""

    weight: Annotated[float, Field(gt=0.0)] = 1.0


class KeydoorSettings(DomainSettings):
    max_turns: Annotated[int, Field(ge=1, le=64)] = 18
    levels: Annotated[tuple[WeightedLevel, ...], Field(min_length=1)] = (
        WeightedLevel(corridor=1, doors=0, side_rooms=3),
        WeightedLevel(corridor=2, doors=1, side_rooms=3, weight=2.0),
        WeightedLevel(corridor=3, doors=2, side_rooms=3),
    )
    """The shortest solutions of these have 3, 8 and 14 actions."""
    clues: bool = True
    """The prompt lists the room of each thing and key; without it, agents must explore."""
    progress_reward: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Part of the return paid for sub-goals (each key that fits a door, each door, the thing), in equal shares as they are
    reached. The return of a won episode is always 1."""
    instructions: bool = False
    """Begin the prompt with the available actions; for models that were not trained on this domain."""


class Recipe(Level):
    """A raw record: a level, and the seed of its names and places."""

    task_id: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")]
    split: Split
    seed: Annotated[int, Field(ge=0, lt=2**63)]
