"""Gradient checkpointing: a layer keeps its input alone and is computed again in the backward pass, for memory.

Transformers' own switch works in training mode only, and here models stay in evaluation mode (dropout would part sampling from
training log-probabilities). So layers are wrapped, with the same flag set; passes without gradients are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute_layers(model: Any) -> None:
    """Let every layer of the model be recomputed in the backward pass. Raises ValueError for a model without such layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"model.gradient_checkpointing: transformers marks no layers of {type(model).__name__} as fit for it; set it to false"
        )
    for layer in layers:
        # A bound method in a partial, no closure: a copy of the model then runs its own layers, not those it was copied from.
        layer.forward = partial(_forward, layer.forward)
        layer.gradient_checkpointing = True


def recomputes(model: Any) -> bool:
    """Whether some layer of the model is recomputed."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
