"""What can be set for TextWorld (params.yaml, per_domain.textworld.environment), and what a raw record must hold."""

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
"""The numbers in entity names (room54, box12), by split: no name of a test game occurs in training."""
MAX_ENTITIES = min(len(numbers) for numbers in NAME_NUMBERS.values())


class Level(BaseModel):
    """How large a game is. `quest_length` counts the commands of the quest from its own start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rooms: Annotated[int, Field(ge=1, le=10)]
    objects: Annotated[int, Field(ge=1, le=10)]
    quest_length: Annotated[int, Field(ge=1, le=10)]


class TextWorldSettings(DomainSettings):
    """Settings of the environment, and of the recipes it writes (`python -m stages.curation raw textworld`)."""

    max_turns: Annotated[int, Field(ge=1, le=200)] = 12
    levels: Annotated[tuple[Level, ...], Field(min_length=1)] = (
        Level(rooms=3, objects=3, quest_length=3),
        Level(rooms=4, objects=4, quest_length=4),
        Level(rooms=5, objects=5, quest_length=5),
    )
    """Recipes take these in turn."""
    goals: Annotated[tuple[Goal, ...], Field(min_length=1)] = ("take", "put", "insert", "open", "unlock")
    """Kinds of last action; recipes take these in turn."""
    starts: Annotated[int, Field(ge=1, le=10)] = 4
    """Tasks per game: the quest's own start, then other rooms. At most as many as there are rooms."""
    instructions: Instructions = "goal"
    """`goal` names the last action alone, so that the agent has to explore; `full` lists every step."""
    show_admissible: bool = False
    """Append the commands that would be accepted to every observation."""
    idle_commands: bool = False
    """Count `look`, `inventory` and `examine ...`, which change nothing, among the admissible commands."""
    progress_reward: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Part of the reward paid for nearing the goal. The return of a won episode is 1 whatever this is."""


class Recipe(Checked):
    """One raw record: the whole game and where the agent starts in it."""

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
    """Commands of the shortest solution, as `recipes` found it; without it the task is measured when it is built."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.start >= self.rooms:
            raise ValueError(f"start {self.start} needs a room of its own, and there are {self.rooms} rooms")
        if self.instructions == "full" and self.start:
            raise ValueError(f"full instructions hold for start 0 only, not for start {self.start}")
        return self

    @property
    def game_id(self) -> str:
        """Name of the game: records that differ in `start` alone share it."""
        values = self.model_dump(exclude={"task_id", "start", "solution_length"})
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.split}-{digest}"


def parse_recipe(record: Mapping[str, Any]) -> Recipe:
    """A raw record, checked. Raises ValueError with one line per mistake: the key, what is wrong and what was given."""
    return parse_record(Recipe, record, "textworld")
