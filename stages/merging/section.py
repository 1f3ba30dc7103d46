"""Section `merge` of params.yaml."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.merging.methods import dare, ram, slerp, ties
from stages.merging.registry import check_method, own_settings
from stages.runtime.validation import Positive


class Merge(ties.Settings, dare.Settings, slerp.Settings, ram.Settings):
    """How the specialists become one model: settings of all methods, and of those shipped here."""

    method: str = "ram_plus"
    """A module of stages/merging/methods, or a method of another package (docs/extending.md)."""
    base: Literal["sft", "base"] = "sft"
    """The model that deltas are taken against."""
    weights: dict[str, Positive] = {}
    """Per domain; 1 if not given."""
    settings: dict[str, Any] = {}
    """Settings of a method from another package."""
    out_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the merged weights."""
    shard_bytes: Annotated[int, Field(ge=1_000_000)] = 5_000_000_000
    """Largest safetensors file that is written."""

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        check_method(value)
        return value

    @model_validator(mode="after")
    def _own_keys(self) -> Merge:
        own_settings(self.method, self.model_dump(exclude={"settings"}), self.settings)
        return self
