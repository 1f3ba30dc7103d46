"""The schema of data/base/params.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from stages.runtime.validation import ParamsError, Section, explain


class Phase(Section):
    """One phase of the curriculum."""

    steps: Annotated[int, Field(ge=1)]
    """Maximum number of steps."""
    until: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The phase ends early once the accuracy on answer tokens over the last 25 steps exceeds this: the step at which circuits
    form varies by hundreds."""
    families: dict[str, float]
    """Family of look-ups -> weight."""
    restate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of look-ups that restate the key before the answer."""
    ahead: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of look-ups in pages and rooms whose question precedes the text."""
    led: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of look-ups in which other words precede each answer."""
    transcripts: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of samples that are transcripts of random play."""
    context_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Loss weight of tokens that are not answers."""
    softmax: Literal["phase", "all"] = "all"
    """Normalise over the tokens that occur as this phase's targets, or over all. Circuits form several times faster over few
    tokens: with tied embeddings, a model first learns only to suppress the hundreds of tokens that never occur."""


class Settings(Section):
    """Model, text and training of the shipped base model."""

    seed: int = 0
    layers: Annotated[int, Field(ge=1)] = 3
    hidden: Annotated[int, Field(ge=32)] = 160
    intermediate: Annotated[int, Field(ge=32)] = 512
    heads: Annotated[int, Field(ge=1)] = 5
    vocabulary: Annotated[int, Field(ge=300)] = 768
    """Maximum size; the tokenizer stops earlier when no pairs are left to merge."""
    max_length: Annotated[int, Field(ge=64)] = 1024
    batch: Annotated[int, Field(ge=1)] = 32
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.03
    decay: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Final share of the steps, over which the learning rate falls to a tenth; before that it is constant."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    phases: Annotated[tuple[Phase, ...], Field(min_length=1, strict=False)]
    transcript_tasks: Annotated[int, Field(ge=0)] = 96
    """Tasks per environment for random play, in separate worlds."""
    transcript_plays: Annotated[int, Field(ge=1)] = 4
    checkpoint_every: Annotated[int, Field(ge=1)] = 100

    @property
    def steps(self) -> int:
        """Maximum number of steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def phase_number(self, place: int) -> int:
        """Index of the phase that contains batch `place` (from 0) of the corpus. Raises IndexError beyond the last phase."""
        for number, phase in enumerate(self.phases):
            if place < phase.steps:
                return number
            place -= phase.steps
        raise IndexError(f"the batch is {place} beyond the last phase")

    def phase_end(self, number: int) -> int:
        """The first batch after phase `number`."""
        return sum(phase.steps for phase in self.phases[: number + 1])


def load_settings(path: Path) -> Settings:
    """The settings in the file at `path`. Raises ParamsError naming the key of an invalid value."""
    try:
        return Settings.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except ValidationError as error:
        raise ParamsError(explain(error, Settings, path.name)) from error
