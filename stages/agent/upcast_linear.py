"""A frozen linear layer of lower precision, computed in float32 a slice of its outputs at a time.

A float32 copy of an output layer of 262,144 words (Gemma 3 270M) takes 671 MB, and on a CPU more time than its product with a
hundred hidden states. Slices stay in the cache; results are those of the whole copy, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SLICE = {"cpu": 1024}
"""Outputs computed at once, by device; others: all, since a GPU converts them in a millisecond."""


def upcast_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs @ weight.T + bias in the inputs' precision: [..., D], [V, D], [V] -> [..., V]. Only the inputs get a gradient, once;
    raises ValueError for parameters that are trained."""
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if trained and inputs.requires_grad and torch.is_grad_enabled():
        raise ValueError("the output layer is trained in lower precision than float32; load the model in float32")
    return _UpcastLinear.apply(inputs, weight, bias)


def _slices(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The rows of `weight`, converted, a slice at a time."""
    size = SLICE.get(weight.device.type, len(weight))
    for start in range(0, len(weight), size):
        own = slice(start, start + size)
        yield own, weight[own].to(dtype)


class _UpcastLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        rows = inputs.reshape(-1, inputs.shape[-1])
        found = rows.new_empty(len(rows), len(weight))
        for own, part in _slices(weight, rows.dtype):
            torch.mm(rows, part.t(), out=found[:, own])
        if bias is not None:
            found += bias.to(rows.dtype)
        return found.view(*inputs.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        rows = gradients[0].reshape(-1, len(weight))
        total = rows.new_zeros(len(rows), weight.shape[-1])
        for own, part in _slices(weight, rows.dtype):
            total.addmm_(rows[:, own], part)
        return total.view(*gradients[0].shape[:-1], -1), None, None
