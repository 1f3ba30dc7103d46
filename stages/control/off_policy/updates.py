"""What updates of every agent of lane control have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FlatAdam:
    """Adam (Kingma and Ba, arXiv 1412.6980) on parameters side by side in one array, of which they become views: an update is one
    call for all of them. They must stay these views: change them in place, and copy a module before it is given to an optimiser.

    A group that gets no gradient from a loss stays as it is, and so do its moments. In a group that gets one, a parameter without
    has gradient 0, so that momentum and weight decay still move it.
    """

    def __init__(
        self,
        *groups: Iterable[nn.Parameter],
        learning_rate: float | Sequence[float],
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        largest_norm: float | None = None,
        decoupled: bool = False,
    ) -> None:
        """learning_rate: of all groups, or each one's. weight_decay: of L2 regularisation; decoupled: as AdamW has it (arXiv
        1711.05101). largest_norm: of a group's gradient; a longer one is scaled down to it."""
        self.groups = [list(group) for group in groups]
        self.rates = list(learning_rate) if isinstance(learning_rate, Sequence) else [learning_rate] * len(self.groups)
        self.parameters = [parameter for group in self.groups for parameter in group]
        options = {"eps": epsilon, "weight_decay": weight_decay}
        self.options: dict[str, Any] = {**options, "beta1": 0.9, "beta2": 0.999, "amsgrad": False, "maximize": False}
        self.largest_norm = largest_norm
        # what torch.optim.Adam(fused=True) calls, without its bookkeeping, which takes about as long for small networks
        self.fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self.flat = [flattened(group) for group in self.groups]
        self.moments = [(torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros(())) for flat in self.flat]
        """Of each group: mean of the gradient and of its square, and the number of updates."""

    def descend(self, loss: Tensor) -> None:
        """One update by the gradient of `loss`, a number. Raises RuntimeError if a parameter is no view of the array any more."""
        gradients = iter(torch.autograd.grad(loss, self.parameters, allow_unused=True))
        for group, flat, moments, rate in zip(self.groups, self.flat, self.moments, self.rates, strict=True):
            if group[0].data_ptr() != flat.data_ptr():
                raise RuntimeError("the optimiser's parameters were copied or replaced; make a new optimiser of them")
            found = [next(gradients) for _ in group]
            if any(one is not None for one in found):
                self._step(flat, joined(group, found), moments, rate)

    @torch.no_grad()
    def _step(self, flat: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor, Tensor], rate: float) -> None:
        if self.largest_norm is not None:
            norm = float(torch.linalg.vector_norm(gradient))
            if norm > self.largest_norm:
                gradient *= self.largest_norm / norm
        mean, square, updates = moments
        updates += 1
        # Without this, moments of weights without gradient (dead units) decay to denormal numbers, which take many times longer.
        # It holds for one thread, and threads that begin meanwhile keep it: with several threads, slow but the same everywhere.
        flushing = torch.get_num_threads() == 1 and torch.set_flush_denormal(True)
        try:
            self.fused([flat], [gradient], [mean], [square], [], [updates], lr=rate, **self.options)
        finally:
            if flushing:
                torch.set_flush_denormal(False)

    def state_dict(self) -> dict[str, Any]:
        """The moments."""
        return {"moments": [list(moments) for moments in self.moments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these moments. Raises ValueError, RuntimeError if they are of other parameters."""
        for moments, saved in zip(self.moments, state["moments"], strict=True):
            for own, other in zip(moments, saved, strict=True):
                own.copy_(other)


def flattened(parameters: list[nn.Parameter]) -> Tensor:
    """One array that holds the parameters, which become views of it."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view_as(parameter)
    return flat


def joined(parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> Tensor:
    """The gradients as one array, 0 where there is none."""
    pairs = zip(parameters, gradients, strict=True)
    return torch.cat([(torch.zeros_like(one) if found is None else found).reshape(-1) for one, found in pairs])


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """Move the slow copy's parameters towards those of `fast` by this share of the way."""
    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), rate)
