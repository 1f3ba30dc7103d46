"""Gradient checkpointing: layers store only their inputs and are recomputed in the backward pass, to save memory.

Transformers' own switch works in training mode only, and models here stay in evaluation mode, without dropout. So layers are
wrapped, with the same flag set. Code that calls a layer's parts itself runs them by `recomputed`. Passes without gradients are
unaffected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        layer.forward = partial(_layer, layer.forward, model.config)
        layer.gradient_checkpointing = True


def recomputes(model: Any) -> bool:
    """Whether some layer of the model is recomputed."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def recomputed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`run` on the arguments; if gradients are on, it keeps only these, and runs again in the backward pass."""
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@contextmanager
def attending(config: Any, implementation: str) -> Iterator[None]:
    """Within it, the model of `config` attends by one of transformers' implementations."""
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def _layer(forward: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's `recomputed` forward pass, which attends the second time as the first."""
    implementation = config._attn_implementation

    def run(*args: Any, **kwargs: Any) -> Any:
        with attending(config, implementation):
            return forward(*args, **kwargs)

    return recomputed(run, *args, **kwargs)
