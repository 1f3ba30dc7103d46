"""Section `sft` of params.yaml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from stages.judging.utility_settings import Control
from stages.runtime.validation import Count, NonNegative, Positive, Section, Share


class Sft(Section):
    """Supervised fine-tuning on the demonstrations of all domains."""

    demonstrations: Annotated[int, Field(ge=0)] | None = None
    """Demonstrations of each domain, drawn at random; 0: none, so rl starts from the base model; null: all."""
    guided: Share = 0.0
    """Share of the demonstrations that have a hint in their first message, as in the guided attempts of `rl.guidance`: for models
    that do not know what to do with hints."""
    instructed: Share = 0.0
    """Share of the demonstrations that have instructions in their first message, of those that they follow
    (stages/agent/instructions.py): for `rl.tasks.source: instructions` with models that do not know any."""
    epochs: Positive = 4.0
    """Passes over the demonstrations."""
    batch_tokens: Annotated[int, Field(ge=256)] = 2048
    """Approximate number of tokens per optimiser step, in whole demonstrations."""
    learning_rate: Positive = 5e-4
    """Peak, after the warm-up."""
    warmup: Share = 0.1
    """Share of all steps in which the learning rate rises."""
    weight_decay: NonNegative = 0.01
    """AdamW's."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    eval_every: Count = 50
    """Steps between validations."""
    patience: Count = 4
    """Validations without a lower loss before training stops."""
    checkpoint_every: Count = 100
    """Steps."""
    control: Control = Control()
    """Fine-tuning to an assembly's preferences after the demonstrations."""

    @model_validator(mode="after")
    def _can_rehearse(self) -> Sft:
        if self.demonstrations == 0 and self.control.kind != "none" and self.control.rehearsal:
            raise ValueError(
                "control.rehearsal needs demonstrations, of which sft.demonstrations: 0 leaves none; set control.rehearsal to "
                "0, or sft.demonstrations to null"
            )
        return self
