"""Section `curate` of params.yaml."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from stages.records.task import Split
from stages.runtime.validation import Count, Section, Share, watched


class Curate(Section):
    """Tasks and demonstrations made from raw records."""

    train: Count = 192
    """Training tasks."""
    valid: Count = 24
    """Validation tasks."""
    test: Annotated[int, Field(ge=2)] = 200
    """Tasks of the frozen evaluation panel."""
    # A key of its own default leaves the section's hash, which is in every demonstration, as it is.
    seeds: Annotated[dict[Split, Annotated[int, Field(ge=0, lt=2**31)]], Field(exclude_if=lambda value: not value)] = {}
    """Splits that the domain's recipes draw anew, and with which seed: {test: 1} is a panel of tasks that data/raw lacks, the
    same for every `seed`."""
    expert_demonstrations: Annotated[int, Field(ge=0)] = 1
    """Per training task."""
    noisy_demonstrations: Annotated[int, Field(ge=0)] = 1
    """Per training task."""
    noise: Share = 0.25
    """Probability that an action of a noisy demonstration is a random admissible one."""
    thoughts: Annotated[Literal["none", "expert", "padding"], Field(exclude_if=lambda value: value == "none")] = "none"
    """expert: demonstrations begin each action with the expert's thought, between the markers of model.thinking; padding: with as
    many dots as that thought is long, about a token for each, to compare with thoughts of equal length that say nothing."""
    near_duplicate: Share = 0.97
    """Demonstrations of one task at least this similar (token sequence ratio) are duplicates."""
    imports: list[str] = []
    """Demonstrations and preference pairs from elsewhere: files below data/raw (docs/exchange.md)."""

    @field_validator("imports")
    @classmethod
    def _watched(cls, value: list[str]) -> list[str]:
        for name in value:
            if not watched(name) or PurePosixPath(name).suffix not in (".jsonl", ".parquet"):
                raise ValueError(f"lists {name}; imports must be .jsonl or .parquet files below data/raw, which DVC tracks")
        if len(set(value)) != len(value):
            raise ValueError(f"lists a file twice: {value}")
        stems: dict[str, str] = {}
        for name in value:
            if (first := stems.setdefault(PurePosixPath(name).stem, name)) != name:
                raise ValueError(
                    f"lists {first} and {name}, whose records would have the same ids: an id is the file's name, without folder "
                    "and ending, and the line; rename one of the files"
                )
        return value
