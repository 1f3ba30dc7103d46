"""Settings that several sections of params.yaml have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stages.runtime.validation import Section


class SamplingParams(Section):
    """How tokens are sampled."""

    temperature: Annotated[float, Field(ge=0.0, le=5.0)] = 1.0
    """0: greedy decoding."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: off."""
    max_tokens: Annotated[int, Field(ge=1, le=32768)] = 24
    """Tokens per turn."""

    @property
    def restricted(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)
