"""Gradients through an output layer that is not trained, without keeping or recomputing its logits.

What is read from a token's logits depends on that token's hidden state alone. So the gradient of each value with respect to its
hidden state, a vector, can be computed right after the logits, which are then dropped; the backward pass only scales it. Memory
is one chunk of logits and a hidden state per value, where autograd would keep all logits or compute them twice. With the 262,144
words of Gemma 3, the logits of a thousand tokens take 1 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def is_frozen(layer: nn.Module) -> bool:
    """Whether no parameter of the output layer is trained."""
    return not any(parameter.requires_grad for parameter in layer.parameters())


def in_chunks(tensors: Sequence[Tensor], chunk: int) -> Iterator[list[Tensor]]:
    """The tensors' rows, `chunk` at a time; once if there are none."""
    for start in range(0, max(len(tensors[0]), 1), chunk):
        yield [tensor[start : start + chunk] for tensor in tensors]


def frozen_head(read: Callable[..., tuple[Tensor, ...]], chunk: int, hidden: Tensor, *along: Tensor) -> tuple[Tensor, ...]:
    """`read(hidden, *along)`, which returns values [N], for hidden states [N, D], `chunk` rows at a time.

    Each value must depend on its own row alone. First derivatives only, with respect to `hidden`; `read` gets it in at least
    float32 and runs without autocast. Each value with a gradient takes a product with the output layer's weights of its own.
    Raises ValueError for another tensor that has a gradient.
    """
    return _FrozenHead.apply(read, chunk, hidden, *along)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, read: Callable[..., tuple[Tensor, ...]], chunk: int, hidden: Tensor, *along: Tensor) -> Any:
        if any(tensor.requires_grad for tensor in along):
            raise ValueError("only the hidden states get a gradient; detach the other tensors")
        ctx.precision = hidden.dtype
        columns: list[list[Tensor]] = []
        slopes: list[list[Tensor]] = []
        for piece, *others in in_chunks((hidden, *along), chunk):
            leaf = piece.detach().to(torch.promote_types(piece.dtype, torch.float32)).requires_grad_()
            # Not under the caller's autocast, which would compute the gradient in lower precision than the values.
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                values = read(leaf, *others)
                sums = [value.sum() for value in values if value.requires_grad]
                columns.append([value.detach() for value in values])
                slopes.append([torch.autograd.grad(each, leaf, retain_graph=each is not sums[-1])[0] for each in sums])
            ctx.places = [place for place, value in enumerate(values) if value.requires_grad]
        ctx.save_for_backward(*(torch.cat(column) for column in zip(*slopes, strict=True)))
        found = tuple(torch.cat(column) for column in zip(*columns, strict=True))
        ctx.mark_non_differentiable(*(value for place, value in enumerate(found) if place not in ctx.places))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total: Tensor | None = None
        for place, slope in zip(ctx.places, ctx.saved_tensors, strict=True):
            scaled = gradients[place][:, None] * slope
            total = scaled if total is None else total + scaled
        return None, None, None if total is None else total.to(ctx.precision), *[None] * (len(ctx.needs_input_grad) - 3)
