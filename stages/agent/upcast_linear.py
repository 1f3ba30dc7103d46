"""A frozen linear layer of lower precision, computed in float32 a slice of its outputs at a time.

A float32 copy of an output layer of 262,144 words (Gemma 3 270M) takes 671 MB, and on a CPU more time than its product with a
hundred hidden states. On a CPU, slices stay in the cache; results are those of the whole copy, bit for bit.

A GPU multiplies bfloat16 with float32 sums, without a copy and ten times as fast: the other factor is there the sum of two
bfloat16 numbers, which is off by at most 2^-17 of its value, and not at all if it was bfloat16 before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SLICE = {"cpu": 1024}
"""Outputs computed at once, by device; others: all, since a GPU converts them in a millisecond."""


def upcast_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs @ weight.T + bias in the inputs' precision (on a GPU, see above): [..., D], [V, D], [V] -> [..., V]. Only the inputs
    get a gradient, once; raises ValueError for parameters that are trained."""
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


@cache
def multiplies_mixed(device: str) -> bool:
    """Whether the type of device multiplies bfloat16 matrices into float32: CUDA, from PyTorch 2.8 on."""
    if device != "cuda":
        return False
    try:
        one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError, TypeError):
        return False


def _mixed(rows: Tensor, weight: Tensor) -> bool:
    """Whether `rows` @ `weight` can be computed by products of bfloat16 matrices."""
    return rows.dtype == torch.float32 and weight.dtype == torch.bfloat16 and multiplies_mixed(weight.device.type)


def _mixed_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [n, k] float32 @ weight [k, m] bfloat16 -> [n, m] float32."""
    upper = rows.to(torch.bfloat16)
    lower = (rows - upper).to(torch.bfloat16)
    return torch.mm(upper, weight, out_dtype=torch.float32).add_(torch.mm(lower, weight, out_dtype=torch.float32))


class _UpcastLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        rows = inputs.reshape(-1, inputs.shape[-1])
        if _mixed(rows, weight):
            found = _mixed_product(rows, weight.t())
        else:
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
        if _mixed(rows, weight):
            total = _mixed_product(rows, weight)
        else:
            total = rows.new_zeros(len(rows), weight.shape[-1])
            for own, part in _slices(weight, rows.dtype):
                total.addmm_(rows[:, own], part)
        return total.view(*gradients[0].shape[:-1], -1), None, None
