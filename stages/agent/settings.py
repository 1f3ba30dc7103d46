"""Sections `model` and `rollout` of params.yaml, and what surrounds a model that is evaluated."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.engine.settings import SamplingParams
from stages.records.thinking import Thinking
from stages.runtime.validation import Count, Section


class Lora(Section):
    """Low-rank factors are trained beside frozen weights, through peft. Without dropout: sampling and training log-probs would
    part."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: no LoRA, all weights are trained."""
    alpha: Count = 32
    """Factors' product is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers that get factors: all linear ones but the output layer, or those whose names end so."""

    @model_validator(mode="after")
    def _peft(self) -> Lora:
        if self.rank and importlib.util.find_spec("peft") is None:
            raise ValueError(
                f"rank {self.rank} needs peft, which is not installed: pip install 'bellwether[lora]', or set rank to 0"
            )
        return self


class Model(Section):
    """The base model, and how it is trained."""

    path: str = "data/base"
    """A local `save_pretrained` folder, or a hub name (`hub:org/name`), the only thing that may download."""
    max_length: Annotated[int, Field(ge=64)] = 640
    """Longest episode in tokens."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, more time in training, the same gradient."""
    lora: Lora = Lora()
    thinking: Thinking | None = None
    """For models that reason before they act: marks around the thought, which the environment does not get. null: none, a turn is
    the action."""


class Rollout(Section):
    """Attempts of the SFT policy at training tasks."""

    attempts: Annotated[int, Field(ge=1, le=256)] = 4
    """Per task."""
    tasks: Count = 96
    """Training tasks to try (all, if there are fewer)."""
    chunk: Count = 192
    """Episodes between checkpoints."""
    sampling: SamplingParams = SamplingParams()


class ScaffoldParams(Section):
    """What surrounds the model while it is evaluated: stages/agent/scaffold.py."""

    window: Annotated[int, Field(ge=1)] | None = None
    """Newest turns that the model sees, with the task; null: all."""
    recall: Literal["none", "action", "task", "both"] = "none"
    """What observations end with: the action that they answer, the task, or both."""
    think: Literal["none", "plan", "reflect", "both"] = "none"
    """Turns in which the model writes and nothing is played: one at the start, one after each action that was refused, or
    both."""
    note: str = ""
    """What stands before every task."""
    max_turns: Count | None = None
    """Turns that the agent allows itself, thoughts included; null: as many as the environment does."""
