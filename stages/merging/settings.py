"""Section `merge` of params.yaml: its own keys, and those of the shipped methods, each declared in its method's module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, create_model, field_validator, model_validator

from stages.merging.contract import MergeParams
from stages.merging.registry import bind, check_method, get_merger, own_settings, shipped
from stages.runtime.validation import Positive, Section, refuse_idle

METHODS = {name: get_merger(name).Settings for name in shipped()}
"""Shipped method -> its settings."""


def declared() -> dict[str, Any]:
    """The keys of all methods, as fields for `create_model`. Raises TypeError where two methods declare a key differently."""
    fields: dict[str, Any] = {}
    for method, settings in METHODS.items():
        for key, field in settings.model_fields.items():
            known = fields.setdefault(key, (field.annotation, field))[1]
            if (known.annotation, known.metadata, known.default) != (field.annotation, field.metadata, field.default):
                raise TypeError(f"merge method {method} declares the key {key} unlike the methods before it; rename it")
    return fields


Declared = create_model("Declared", __base__=Section, **declared())


class Merge(Declared):  # type: ignore[valid-type, misc]
    """How the specialists become one model: settings of all methods, and of those shipped here."""

    assembled_from: ClassVar[Sequence[type[Section]]] = tuple(dict.fromkeys(METHODS.values()))
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
    def _keys(self) -> Merge:
        own_settings(self.method, self.given(), self.settings)
        if self.takes_turns and self.base != "sft":
            raise ValueError(f"method {self.method} starts where the specialists do: set base to sft")
        readers = {key: [name for name, settings in METHODS.items() if key in settings.model_fields] for key in declared()}
        # Sections such as `ram` name their methods; they may stay while another method is tried.
        idle = {key: names for key, names in readers.items() if not isinstance(getattr(self, key), BaseModel)}
        needs = {key: (self.method in names, f"method {' or '.join(names)}") for key, names in idle.items()}
        writes = not get_merger(self.method).trains, "a method that merges weights"
        refuse_idle(self, "", {**needs, "out_dtype": writes, "shard_bytes": writes})
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether one policy learns all domains in turn, from the SFT policy on, by their sections `rl`."""
        return not get_merger(self.method).from_specialists

    def given(self) -> dict[str, Any]:
        """The keys of the shipped methods, as plain values."""
        return self.model_dump(include=set(declared()))

    def weights_of(self, models: Sequence[str]) -> tuple[float, ...]:
        """One weight for each of `models` (domain names, in merge order)."""
        return tuple(self.weights.get(name, 1.0) for name in models)

    def bind(self, models: Sequence[str]) -> MergeParams:
        """The chosen method's parameters for `models` (domain names, in merge order). Raises MergeError."""
        return bind(self.method, self.weights_of(models), self.given(), self.settings)
