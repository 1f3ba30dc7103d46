"""What can be set for keydoor (params.yaml, per_domain.keydoor.environment), and what a raw record must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from stages.environments.base_domain import parse_record
from stages.environments.protocol import DomainSettings
from stages.records.task import Split
from stages.runtime.validation import Checked

MAX_KEYS = 10
"""Different keys that there are."""


class Level(Checked):
    """How large a world is. Every number grows the shortest solution or the ways to go astray."""

    corridor: Annotated[int, Field(ge=0, le=8)]
    """Rooms in a row before the first fork: one way on, nothing to decide, and free to turn back."""
    doors: Annotated[int, Field(ge=0, le=4)]
    """Locked doors, one behind the other; each one's key lies in a side room before it."""
    side_rooms: Annotated[int, Field(ge=1, le=4)] = 2
    """Side rooms at each fork. One of them holds what is needed; the way into the others is lost time."""
    decoys: Annotated[int, Field(ge=0, le=3)] = 0
    """Of the other side rooms at each fork, how many hold a key that fits no door."""
    deliver: bool = False
    """The thing has to be brought back to the room where the episode starts."""

    @model_validator(mode="after")
    def _fits(self) -> Level:
        if self.decoys >= self.side_rooms:
            raise ValueError(f"{self.decoys} decoys do not fit: of {self.side_rooms} side rooms one holds what is needed")
        if self.keys > MAX_KEYS:
            raise ValueError(f"{self.keys} keys are more than the {MAX_KEYS} that there are; ask for fewer doors or decoys")
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
        """Actions of the shortest solution: per door to the key, take it, back, unlock, through; without doors, into the room."""
        way = self.corridor + (5 * self.doors if self.doors else 1)
        back = self.corridor + max(self.doors, 1) + 1 if self.deliver else 0
        return way + 1 + back


class WeightedLevel(Level):
    """A level and its weight in recipes and among the tasks that curation takes."""

    weight: Annotated[float, Field(gt=0.0)] = 1.0


class KeydoorSettings(DomainSettings):
    """Settings of the environment, and of the recipes it writes (`python -m stages.curation raw keydoor`)."""

    max_turns: Annotated[int, Field(ge=1, le=64)] = 18
    levels: Annotated[tuple[WeightedLevel, ...], Field(min_length=1)] = (
        WeightedLevel(corridor=1, doors=0, side_rooms=3),
        WeightedLevel(corridor=2, doors=1, side_rooms=3, weight=2.0),
        WeightedLevel(corridor=3, doors=2, side_rooms=3),
    )
    """Shortest solutions of 3, 8 and 14 actions."""
    clues: bool = True
    """The prompt says in which room each thing and key is; without it, agents have to look for them."""
    progress_reward: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Part of the return paid for sub-goals (each key that fits a door, each door, the thing), in equal shares as they are
    reached. The return of a won episode is 1 whatever this is."""
    instructions: bool = False
    """Put the available actions before the goal; for models that were not trained on this domain."""


class Recipe(Level):
    """One raw record: a level, and the seed that draws names and places."""

    task_id: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")]
    split: Split
    seed: Annotated[int, Field(ge=0, lt=2**63)]


def parse_recipe(record: Mapping[str, Any]) -> Recipe:
    """A raw record, checked. Raises ValueError with one line per mistake: the key, what is wrong and what was given."""
    return parse_record(Recipe, record, "keydoor")
