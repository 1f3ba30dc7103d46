"""Updates that leave most weights as they were, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.algorithms.parts.sparse import Sparse


def largest(gradient: Tensor, share: float) -> Tensor:
    """Mask [*shape] of the int(share * n) entries with the largest |gradient|, at least one; of equal ones the earlier."""
    count = max(1, int(share * gradient.numel() + 1e-9))
    order = torch.sort(gradient.abs().flatten(), descending=True, stable=True).indices[:count]
    return torch.zeros(gradient.numel(), dtype=torch.bool, device=gradient.device).index_fill_(0, order, True).view_as(gradient)


class SparseUpdates:
    """Restricts a learner's updates. `before` the step it masks the gradients, `after` it undoes what rounding loses."""

    def __init__(self, settings: Sparse) -> None:
        self.settings = settings
        self.masks: list[Tensor | None] = []
        """Per parameter, the weights that may change; None: not chosen yet, as all its gradients were 0."""
        self._old: list[Tensor] = []

    def before(self, parameters: Sequence[Tensor]) -> None:
        """parameters: with the update's gradients. Entries outside the masks get gradient 0: AdamW without weight decay then
        leaves them as they are, since their moments stay 0."""
        if self.settings.share < 1.0:
            self.masks = self.masks or [None] * len(parameters)
            for place, parameter in enumerate(parameters):
                if parameter.grad is None:
                    continue
                if self.masks[place] is None and bool(parameter.grad.any()):  # zeros, as of dead groups, choose nothing
                    self.masks[place] = largest(parameter.grad, self.settings.share)
                if (mask := self.masks[place]) is not None:
                    parameter.grad.mul_(mask)
        if self.settings.rounding == "bfloat16":
            self._old = [parameter.detach().clone() for parameter in parameters]

    def after(self, parameters: Sequence[Tensor]) -> None:
        """Put back the weights whose bfloat16 value the step did not change."""
        with torch.no_grad():
            for parameter, old in zip(parameters, self._old, strict=False):
                parameter.copy_(torch.where(parameter.bfloat16() == old.bfloat16(), old, parameter))
        self._old = []

    def state_dict(self) -> dict[str, Any]:
        return {"masks": self.masks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.masks = state["masks"]
