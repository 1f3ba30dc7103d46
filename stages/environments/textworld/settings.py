"""Settings of the textworld domain (per_domain.textworld.environment in params.yaml), and its raw records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.environments.base_domain import parse_record
from stages.environments.protocol import DomainSettings
from stages.records.task import Split
from stages.runtime.validation import Checked
from stages.seeding import permutation

Goal = Literal["take", "put", "insert", "open", "unlock", "drop", "eat"]
Instructions = Literal["goal", "full"]

_NUMBERS = permutation(range(10, 100), "textworld", "names")
NAME_NUMBERS: dict[Split, tuple[int, ...]] = {
    "train": tuple(sorted(_NUMBERS[:40])),
    "valid": tuple(sorted(_NUMBERS[40:60])),
    "test": tuple(sorted(_NUMBERS[60:])),
}
"""Split -> numbers in entity names (room54, box12): no name of a test game occurs in training."""


class Level(BaseModel):
    """The size of a game. `quest_length`: commands of the quest from its own start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rooms: Annotated[int, Field(ge=1, le=10)]
    objects: Annotated[int, Field(ge=1, le=10)]
    quest_length: Annotated[int, Field(ge=1, le=10)]


class TextWorldSettings(DomainSettings):
    max_turns: Annotated[int, Field(ge=1, le=200)] = 12
    levels: Annotated[tuple[Level, ...], Field(min_length=1)] = (
        Level(rooms=3, objects=3, quest_length=3),
        Level(rooms=4, objects=4, quest_length=4),
        Level(rooms=5, objects=5, quest_length=5),
    )
    """Recipes take these in turn."""
    goals: Annotated[tuple[Goal, ...], Field(min_length=1)] = ("take", "put", "insert", "open", "unlock")
    """Kinds of final action; recipes take these in turn."""
    starts: Annotated[int, Field(ge=1, le=10)] = 4
    """Tasks per game: the quest's own start, then other rooms; at most the number of rooms."""
    instructions: Instructions = "goal"
    """`goal` names only the final action, so that the agent must explore; `full` lists every step."""
    show_admissible: bool = False
    """Append the admissible commands to every observation."""
    idle_commands: bool = False
    """Count `look`, `inventory` and `examine ...`, which change nothing, among the admissible commands."""
    progress_reward: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Part of the reward paid for progress. The return of a won episode is always 1."""


class Recipe(Checked):
    """A raw record: the game and the agent's start."""

    task_id: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")]
    split: Split
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    rooms: Annotated[int, Field(ge=1, le=10)]
    objects: Annotated[int, Field(ge=1, le=10)]
    quest_length: Annotated[int, Field(ge=1, le=10)]
    goal: Goal
    instructions: Instructions
    start: Annotated[int, Field(ge=0, le=9)]
    solution_length: Annotated[int, Field(ge=1)] | None = None
    """Commands of the shortest solution, checked when the game is built; null: not checked."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.start >= self.rooms:
            raise ValueError(f"start {self.start} is out of range; the game has {self.rooms} rooms, numbered from 0")
        if self.instructions == "full" and self.start:
            raise ValueError(f"full instructions are only valid for start 0, not for start {self.start}")
        return self

    @property
    def game_id(self) -> str:
        """The game's name; records that differ only in `start` share it."""
        values = self.model_dump(exclude={"task_id", "start", "solution_length"})
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.split}-{digest}"


def parse_recipe(record: Mapping[str, Any]) -> Recipe:
    """A validated raw record. Raises ValueError naming each wrong key, what is wrong and the value."""
    return parse_record(Recipe, record, "textworld")
