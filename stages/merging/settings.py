"""What a merge method is given: the `merge` section of params.yaml with one weight per model, in model order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stages.params import Merge, Ram, Slerp, Ties


class MergeError(ValueError):
    """Models that cannot be merged, or a setting the method has no use for; the message says which and what to do."""


@dataclass(frozen=True)
class MergeSettings:
    """`weights[i]` belongs to model i; `layers` is the number of layers, set by the streamer for gradients over depth."""

    weights: tuple[float, ...]
    normalize: bool | None = None
    lam: float = 1.0
    density: float = 0.5
    rescale: Literal["inverse_density", "l1", "none"] = "inverse_density"
    ties: Ties = field(default_factory=Ties)
    slerp: Slerp = field(default_factory=Slerp)
    ram: Ram = field(default_factory=Ram)
    layers: int = 1

    @classmethod
    def of(cls, merge: Merge, models: Sequence[str]) -> MergeSettings:
        """Settings for `models` (domain names; the order is the contract); weight 1 where `merge.weights` names none."""
        return cls(
            weights=tuple(merge.weights.get(name, 1.0) for name in models),
            normalize=merge.normalize,
            lam=merge.lam,
            density=merge.density,
            rescale=merge.rescale,
            ties=merge.ties,
            slerp=merge.slerp,
            ram=merge.ram,
        )
