"""LoRA adapters in the specialised forward pass: peft's layers as two small products, with factors copied from them.

A layer W x + s B (A x) becomes one product with W, one with A and one with s B that adds to the first in place. Projections that
read the same input share one product with their stacked A; B is then block diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.engine.products import is_linear


@dataclass(frozen=True)
class LowRank:
    """What adapters add to a product: inputs @ a.T @ b.T."""

    a: Tensor
    """[rank, in] in the model's precision, as in training under autocast."""
    b: Tensor
    """[out, rank], times the adapters' scale."""

    def add(self, product: Tensor, inputs: Tensor, rows: slice = slice(None)) -> None:
        """Add the outputs `rows` for `inputs` [n, in] to `product` [n, rows]."""
        product.addmm_(inputs @ self.a.t(), self.b[rows].t())

    def copy_(self, other: LowRank) -> None:
        self.a.copy_(other.a)
        self.b.copy_(other.b)


def base(module: Any) -> Any:
    """The layer that an adapter's layer changes; another layer itself."""
    return getattr(module, "base_layer", module)


def is_plain(module: Any) -> bool:
    """Whether a layer is linear, alone or with one plain LoRA adapter that is not merged, disabled or dropped out."""
    if is_linear(module):
        return True
    if not is_linear(base(module)) or not hasattr(module, "lora_A"):
        return False
    (name, *more) = module.active_adapters or [None]
    varied = name in module.lora_variant  # DoRA, for one
    if more or name not in module.lora_A or module.merged or module.disable_adapters or varied:
        return False
    return module.lora_B[name].bias is None and not getattr(module.lora_dropout[name], "p", 0.0)


def low_rank(modules: Sequence[Any], orders: Sequence[Callable[[Tensor], Tensor] | None] | None = None) -> LowRank | None:
    """What the adapters of linear layers with the same input add to their outputs, one after the other; None without adapters.

    orders: how each layer's outputs are reordered; None: not at all.
    """
    if not any(hasattr(module, "lora_A") for module in modules):
        return None
    first = base(modules[0]).weight
    upper, blocks = [], []
    for module, order in zip(modules, orders or [None] * len(modules), strict=True):
        out, width = base(module).weight.shape
        a, b = first.new_zeros(0, width), first.new_zeros(out, 0)
        if hasattr(module, "lora_A"):
            (name,) = module.active_adapters
            a, b = module.lora_A[name].weight.detach(), module.lora_B[name].weight.detach() * module.scaling[name]
        upper.append(a.to(first.dtype))
        blocks.append((b if order is None else order(b)).to(first.dtype))
    return LowRank(torch.cat(upper), torch.block_diag(*blocks))
