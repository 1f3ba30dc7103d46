"""Products of activations with a linear layer's weights in training, forward and backward.

PyTorch multiplies float32 matrices by MKL, which uses half the width of an AMD processor's AVX-512 registers; oneDNN uses all of
it. On other processors, on GPUs, in other precisions and without gradients, products are PyTorch's own: sampling multiplies few
rows at a time, which oneDNN's overhead and memory are not worth. Without gradients `as_in_training` has them multiplied as with
them, where a loss compares the log-probabilities.

oneDNN compiles a kernel for each shape, which takes as long as a product of a thousand rows, and keeps it. So products are
computed with some rows of zeros more, such that few shapes occur. A pass over many rows adds them once (`filled`) and spares each
product a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stages.runtime.cores import processor

FEW, STEP, LARGE_STEP = 512, 64, 128
"""Numbers of rows are rounded up to a multiple of STEP, those above FEW to one of LARGE_STEP."""


_COMPARED: ContextVar[bool] = ContextVar("whether products without gradients are compared with those of training", default=False)


@contextmanager
def as_in_training() -> Iterator[None]:
    """Multiply without gradients as with them, so that losses find the same log-probabilities where weights are the same."""
    token = _COMPARED.set(True)
    try:
        yield
    finally:
        _COMPARED.reset(token)


class FastLinear(nn.Linear):
    """A linear layer with the products of this module."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


def use_products(model: nn.Module) -> None:
    """Make the model's plain linear layers `FastLinear`; its weights and their names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer and nothing more."""
    return type(module) in (nn.Linear, FastLinear)


@cache
def onednn_is_faster() -> bool:
    """Whether this is an AMD processor with AVX-512 under Linux, and PyTorch has both MKL and oneDNN."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return processor("vendor_id") == "AuthenticAMD"


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs @ weight.T + bias: [..., D], [V, D], [V] -> [..., V]. Differentiable once where oneDNN computes it."""
    if inputs.dtype == torch.float32 and inputs.numel() and _is_onednns(weight):
        return _Product.apply(inputs, weight, bias)
    return functional.linear(inputs, weight, bias)


def filled(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [n, ...], followed by zeros up to a number that products with `weight` do not fill up."""
    return _padded(rows) if _is_onednns(weight) else rows


def _is_onednns(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with it: in float32 on a CPU, also where autocast does not make it bfloat16."""
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return plain and (torch.is_grad_enabled() or _COMPARED.get()) and onednn_is_faster()


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1])
    return _multiply(_padded(rows), weight, bias)[: len(rows)].view(*inputs.shape[:-1], -1)


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def _missing(count: int) -> int:
    """How many rows of zeros to add to `count` rows."""
    return -count % (STEP if count <= FEW else LARGE_STEP)


def _padded(rows: Tensor) -> Tensor:
    """rows [n, ...], followed by zeros up to one of few numbers of rows."""
    missing = _missing(len(rows))
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        (gradient,) = (one.contiguous() for one in gradients)  # a sum's is expanded, for which oneDNN has no fast kernel
        rows = gradient.view(-1, len(weight))
        return (
            _product(gradient, weight.t()) if of_inputs else None,
            _outer(_padded(rows), _padded(inputs.reshape(-1, inputs.shape[-1]))) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _outer(gradient: Tensor, inputs: Tensor) -> Tensor:
    """gradient.T @ inputs: [n, V], [n, D] -> [V, D]. oneDNN copies its left factor: the narrower one."""
    if gradient.shape[1] <= inputs.shape[1]:
        return _multiply(gradient.t(), inputs.t())
    return _multiply(inputs.t(), gradient.t()).t().contiguous()
