"""The shape of data/base/params.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from stages.params import ParamsError, Section, explain


class Settings(Section):
    """Model, text and training of the shipped base model."""

    seed: int = 0
    layers: Annotated[int, Field(ge=1)] = 3
    hidden: Annotated[int, Field(ge=32)] = 160
    intermediate: Annotated[int, Field(ge=32)] = 512
    heads: Annotated[int, Field(ge=1)] = 5
    vocabulary: Annotated[int, Field(ge=300)] = 768
    """At most; the tokenizer stops earlier when there is nothing left to merge."""
    max_length: Annotated[int, Field(ge=64)] = 1024
    steps: Annotated[int, Field(ge=1)] = 1200
    batch: Annotated[int, Field(ge=1)] = 32
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.03
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    first_steps: Annotated[int, Field(ge=0)] = 300
    """Steps on `first` alone, keys restated before every answer, until the look-up circuits are there."""
    first: dict[str, float] = Field(default={"recall": 3.0, "copy": 1.0})
    then: dict[str, float] = Field(default={"pages": 4.0, "rooms": 3.0, "codes": 2.0, "recall": 1.0, "copy": 1.0})
    restate: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of the later look-ups that restate the key."""
    transcript_share: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Share of the later samples that are transcripts of aimless policies."""
    transcript_tasks: Annotated[int, Field(ge=0)] = 96
    """Tasks per environment that aimless policies play, in worlds of their own."""
    transcript_plays: Annotated[int, Field(ge=1)] = 4
    context_weight: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Loss weight of tokens that are not answers; 1 for all tokens of transcripts that the environment wrote is too noisy."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 100


def load_settings(path: Path) -> Settings:
    """Raises ParamsError naming the key for a bad value."""
    try:
        return Settings.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except ValidationError as error:
        raise ParamsError(explain(error, str(path.name))) from error
