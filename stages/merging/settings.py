"""What merge methods are given, and the keys that several of them read. Light to import: params.yaml is checked with this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from stages.runtime.validation import NonNegative, Section

if TYPE_CHECKING:
    from stages.merging.section import Merge


class MergeError(ValueError):
    """Models that cannot be merged, or a setting the method has no use for; the message says which and what to do."""


class Normalized(Section):
    normalize: bool | None = None
    """Whether the weighted sum is divided by the weights; null: the method's own default."""


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
        """Settings for `models` (domain names; the order is the contract); weight 1 where `merge.weights` names none."""
        weights = tuple(merge.weights.get(name, 1.0) for name in models)
        return cls(weights, merge.model_dump(exclude={"settings"}), merge.settings)


@dataclass(frozen=True)
class MergeParams:
    """What a method gets: one weight per model, an instance of its own `Settings`, and the number of layers, for gradients over
    depth."""

    weights: tuple[float, ...]
    settings: Any
    layers: int = 1
