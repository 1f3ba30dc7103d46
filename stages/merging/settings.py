"""Parameters of merge methods, and settings that several of them share. Light to import: params.yaml is checked with this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from stages.runtime.validation import NonNegative, Section

if TYPE_CHECKING:
    from stages.merging.section import Merge


class MergeError(ValueError):
    """Models that cannot be merged, or a setting that the method does not use."""


class Normalized(Section):
    normalize: bool | None = None
    """Whether the weighted sum is divided by the sum of the weights; null: the method's default."""


class Scaled(Section):
    lam: NonNegative = 1.0
    """Factor on the merged delta."""


class Sparse(Section):
    density: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of a task vector's entries that are kept."""


@dataclass(frozen=True)
class MergeSettings:
    """`weights[i]` belongs to model i; `given`: keys of section `merge`, by name; `own`: `merge.settings`."""

    weights: tuple[float, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, merge: Merge, models: Sequence[str]) -> MergeSettings:
        """Settings for `models` (domain names, in merge order); weight 1 for those that `merge.weights` lacks."""
        weights = tuple(merge.weights.get(name, 1.0) for name in models)
        return cls(weights, merge.model_dump(exclude={"settings"}), merge.settings)


@dataclass(frozen=True)
class MergeParams:
    """A method's parameters: one weight per model, its `Settings`, and the number of layers, for gradients over depth."""

    weights: tuple[float, ...]
    settings: Any
    layers: int = 1
