"""Settings of sparse updates of the policy; stages/training/common/sparse_updates.py implements them. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.parts.part import Part
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Sparse(Part):
    """Updates of the policy that leave most weights as they were: the premise of RAM (merge.method ram), which training in
    float32 at this project's learning rates does not meet by itself."""

    data = ("episodes", "offline_replay", "pairs", "paths", "attempts")

    share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of each tensor's weights that training may change: those with the largest gradients in the first update. 1: all."""
    rounding: Literal["none", "bfloat16"] = "none"
    """bfloat16: a weight moves only if the update changes its value in bfloat16, as in training with weights of that precision;
    smaller updates are lost, so that small learning rates change few weights."""

    @property
    def active(self) -> bool:
        return self.share < 1.0 or self.rounding != "none"

    def check(self, rl: Rl, method: Composition) -> None:
        if self.share < 1.0 and rl.weight_decay:
            raise ParamsError(
                "rl.weight_decay changes all weights, and rl.sparse.share is below 1: set weight_decay to 0, or share to 1"
            )
        if self.active and rl.warm_start and not rl.warm_start.get("sparse"):
            raise ParamsError(
                "rl.warm_start trains without rl.sparse and changes all weights, which rl.sparse is to leave as they were: give "
                "rl.warm_start a sparse of its own, set rl.warm_start to {}, or remove rl.sparse"
            )

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        if self.active and section("model").lora.rank:
            yield (
                f"rl.sparse selects weights of the full model, and model.lora.rank is {section('model').lora.rank}: set rank to "
                "0, or remove rl.sparse"
            )
