"""Sections `model` and `rollout` of params.yaml."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.engine.settings import SamplingParams
from stages.records.thinking import Thinking
from stages.runtime.validation import Count, Section


class Lora(Section):
    """LoRA by peft, without dropout: with it, sampling and training log-probs would differ. sft folds the factors into the
    weights; rl keeps adapters."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: no LoRA; all weights are trained."""
    alpha: Count = 32
    """The factors' product is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Adapted layers: all linear ones except the output layer, or a list of name endings, such as [q_proj, v_proj]."""

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
    """A `save_pretrained` folder, or `hub:org/name`, which is downloaded."""
    max_length: Annotated[int, Field(ge=64)] = 640
    """Longest episode in tokens."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, more time, the same gradient."""
    lora: Lora = Lora()
    thinking: Thinking | None = None
    """For reasoning models: the markers around thoughts, which are not sent to the environment. null: a turn is the action."""


class Rollout(Section):
    """Attempts of the SFT policy at training tasks."""

    attempts: Annotated[int, Field(ge=1, le=256)] = 4
    """Per task."""
    tasks: Annotated[int, Field(ge=0)] = 0
    """Training tasks; all, if there are fewer. 0: no attempts, so that rl starts without knowing how difficult tasks are."""
    chunk: Count = 192
    """Episodes between checkpoints."""
    sampling: SamplingParams = SamplingParams()
