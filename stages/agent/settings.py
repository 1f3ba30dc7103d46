"""Sections `model`, `rollout` and `evaluate.scaffold` of params.yaml."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.engine.settings import SamplingParams
from stages.records.thinking import Thinking
from stages.runtime.validation import Count, Section


class Lora(Section):
    """Trains low-rank factors beside frozen weights, through peft. There is no dropout: with it, sampling and training log-probs
    would differ."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: no LoRA; all weights are trained."""
    alpha: Count = 32
    """The factors' product is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers with factors: all linear layers except the output layer, or those whose names end with one of these."""

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
    """A local `save_pretrained` folder, or a hub model (`hub:org/name`), the only setting that may download."""
    max_length: Annotated[int, Field(ge=64)] = 640
    """Longest episode in tokens."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, slower training, the same gradient."""
    lora: Lora = Lora()
    thinking: Thinking | None = None
    """Marks around the thoughts of reasoning models, which are not passed to the environment. null: the entire turn is the
    action."""


class Rollout(Section):
    """Attempts of the SFT policy at training tasks."""

    attempts: Annotated[int, Field(ge=1, le=256)] = 4
    """Per task."""
    tasks: Count = 96
    """Training tasks to play (all, if there are fewer)."""
    chunk: Count = 192
    """Episodes between checkpoints."""
    sampling: SamplingParams = SamplingParams()


class ScaffoldParams(Section):
    """The agent around the model in evaluation: stages/agent/scaffold.py."""

    window: Annotated[int, Field(ge=1)] | None = None
    """Newest turns that the model sees, besides the task; null: all."""
    recall: Literal["none", "action", "task", "both"] = "none"
    """Appended to observations: the action that they answer, the task, or both."""
    think: Literal["none", "plan", "reflect", "both"] = "none"
    """Turns for thinking, which are not played: one at the start (plan), one after each rejected action (reflect), or both."""
    note: str = ""
    """Text before every task."""
    max_turns: Count | None = None
    """Maximum turns, thoughts included; null: the environment's limit."""
