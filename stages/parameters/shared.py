"""Settings that several sections of params.yaml have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.validation import Positive, Section


class SamplingParams(Section):
    temperature: Annotated[float, Field(ge=0.0, le=5.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 24
    """Tokens per turn."""


class HeadParams(Section):
    loss: Literal["mse", "two_hot", "hl_gauss", "c51"] = "hl_gauss"
    v_min: float = -0.2
    v_max: float = 1.2
    bins: Annotated[int, Field(ge=2, le=1024)] = 51
    sigma_ratio: Positive = 0.75

    @model_validator(mode="after")
    def _range(self) -> HeadParams:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min ({self.v_min}) must be below v_max ({self.v_max})")
        return self
