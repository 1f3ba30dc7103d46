"""Settings that several merge methods declare. Light to import: params.yaml is checked with this."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from stages.runtime.validation import NonNegative, Section


class Normalized(Section):
    normalize: bool | None = None
    """Whether the weighted sum is divided by the sum of the weights; null: the method's default."""
    default_normalize: ClassVar[bool] = False
    """What null stands for."""

    @property
    def normalized(self) -> bool:
        """`normalize`, or the method's default."""
        return self.default_normalize if self.normalize is None else self.normalize


class Scaled(Section):
    lam: NonNegative = 1.0
    """Factor on the merged delta."""


class Sparse(Section):
    density: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of a task vector's entries that are kept."""
