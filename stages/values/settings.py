"""Scalar heads, as params.yaml names them. What they compute: heads.py; which supports make sense: supports.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.validation import Positive, Section


class HeadParams(Section):
    """How a scalar is learnt: by squared error, or by cross-entropy over a support of `bins` values."""

    loss: Literal["mse", "two_hot", "hl_gauss", "c51"] = "hl_gauss"
    v_min: float = -0.2
    v_max: float = 1.2
    bins: Annotated[int, Field(ge=2, le=1024)] = 51
    sigma_ratio: Positive = 0.75
    """hl_gauss: the Gaussian's standard deviation in bin widths."""

    @model_validator(mode="after")
    def _range(self) -> HeadParams:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min ({self.v_min}) must be below v_max ({self.v_max})")
        return self
