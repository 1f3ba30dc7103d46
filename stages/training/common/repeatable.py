"""Backward passes on a GPU that give the same bits each time.

Forward passes need no care but one: which kernel computes attention's backward pass is decided there, and cuDNN's adds gradients
in any order. So training passes leave it out (`without_cudnn_attention`).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NOT_REPEATABLE = "(?s).*deterministic"
"""PyTorch's warnings about operations that are not repeatable on a GPU."""


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """On a GPU, compute attention by PyTorch's other kernels."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def repeatable(strict: bool) -> Iterator[None]:
    """Add gradients in a fixed order where PyTorch can. strict: also in attention; PyTorch then raises RuntimeError for an
    operation that can't."""
    filling: Any = importlib.import_module("torch.utils.deterministic")
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    filling.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NOT_REPEATABLE)
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        filling.fill_uninitialized_memory = fills


class Backward:
    """Backward passes of losses, on a GPU with the same gradient each time, but for operations that PyTorch can't repeat."""

    def __init__(self, device: torch.device, sharded: bool = False) -> None:
        """sharded: the weights are, over several GPUs; the gradient of attention is then added in any order."""
        self.device = device
        self.strict = not sharded

    def __call__(self, run: Callable[[Tensor], object], loss: Tensor) -> None:
        """`run` is the backward pass of a loss. Raises RuntimeError for an operation that PyTorch can't repeat, see `relents`."""
        if self.device.type != "cuda":
            run(loss)
            return
        with repeatable(self.strict), without_cudnn_attention(self.device):
            run(loss)

    def relents(self, error: RuntimeError) -> bool:
        """Whether `error` names an operation that PyTorch can't repeat. If so, it is printed, and later passes do not insist."""
        if self.device.type != "cuda" or not self.strict or "deterministic" not in str(error):
            return False
        self.strict = False
        reason = str(error).splitlines()[0]
        print(f"training: another run on this GPU may differ in the last bits: {reason}", file=sys.stderr, flush=True)
        return True
