"""Gradient checkpointing: layers store only their inputs and are recomputed in the backward pass, to save memory.

Transformers' own switch works in training mode only, and models here stay in evaluation mode, without dropout. So layers are
wrapped, with the same flag set. Passes without gradients are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute_layers(model: Any) -> None:
    """Recompute every layer of the model in the backward pass. Raises ValueError for a model that does not support it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"model.gradient_checkpointing is not supported by {type(model).__name__} in transformers; set it to false"
        )
    for layer in layers:
        # A partial of a bound method, not a closure: copies of the model then run their own layers.
        layer.forward = partial(_forward, layer.forward)
        layer.gradient_checkpointing = True


def recomputes(model: Any) -> bool:
    """Whether some layer of the model is recomputed."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
