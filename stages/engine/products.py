"""Products of activations with a linear layer's weights, forward and backward.

PyTorch multiplies float32 matrices by MKL, which uses half the width of an AMD processor's AVX-512 registers; oneDNN uses all of
it. On other processors, on GPUs and in other precisions, products are PyTorch's own.

oneDNN compiles a kernel for each shape, which takes as long as a product of a thousand rows. So products are computed with some
rows of zeros more, such that few shapes occur; a row's result does not depend on how many others there are. A pass over many rows
adds them once (`filled`) and spares each product a copy.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

STEPS = ((128, 4), (512, 32))
"""(up to how many rows, a multiple of which their number is rounded up to)."""
LAST_STEP = 128
"""The multiple for more rows."""
Model = TypeVar("Model", bound=nn.Module)


class FastLinear(nn.Linear):
    """A linear layer with the products of this module."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


def use_products(model: Model) -> Model:
    """Make the model's plain linear layers `FastLinear`; its weights and their names stay. Returns the model."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear
    return model


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
    path = Path("/proc/cpuinfo")
    return path.exists() and "AuthenticAMD" in path.read_text(encoding="utf-8")


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs @ weight.T + bias: [..., D], [V, D], [V] -> [..., V]. Differentiable once where oneDNN computes it."""
    if not _is_onednns(inputs, weight):
        return functional.linear(inputs, weight, bias)
    if torch.is_grad_enabled():
        return _Product.apply(inputs, weight, bias)
    return _product(inputs, weight, bias)


def sum_with_product(residual: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """residual + inputs @ weight.T: [T, V], [T, D], [V, D] -> [T, V]. Without gradients."""
    if not _is_onednns(inputs, weight):
        return torch.addmm(residual, inputs, weight.t())
    return _product(inputs, weight).add_(residual)


def filled(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [n, ...], followed by zeros up to a number that products with `weight` do not fill up."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not onednn_is_faster():
        return rows
    return _padded(rows)


def _is_onednns(inputs: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes the product: in float32 on a CPU, also where autocast does not make it bfloat16."""
    both = inputs.dtype == weight.dtype == torch.float32 and inputs.device.type == weight.device.type == "cpu"
    return both and inputs.numel() > 0 and onednn_is_faster() and not torch.is_autocast_enabled("cpu")


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1])
    return _multiply(_padded(rows), weight, bias)[: len(rows)].view(*inputs.shape[:-1], -1)


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def _missing(count: int) -> int:
    """How many rows of zeros to add to `count` rows."""
    step = next((step for most, step in STEPS if count <= most), LAST_STEP)
    return -count % step


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
