"""Backward passes on a GPU that give the same bits each time.

Forward passes need nothing: they scatter to distinct places. cuDNN's attention has no such backward pass, and which kernel
computes it is decided in the forward pass, so cuDNN's is off.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NOT_REPEATABLE = "(?s).*deterministic"
"""PyTorch's warnings about operations that are not repeatable on a GPU."""


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
    """Backward passes of losses of `module`: on a GPU with the same gradient each time, except for what PyTorch can't repeat.

    The first pass shows whether PyTorch can repeat all. If not, it says so and runs again without. With weights sharded over
    GPUs, attention is not repeated.
    """

    def __init__(self, module: nn.Module, device: torch.device, sharded: bool = False) -> None:
        self.module, self.on_gpu = module, device.type == "cuda"
        self.strict: bool | None = False if sharded else None
        """None: not known yet."""
        if self.on_gpu:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def __call__(self, run: Callable[..., object], loss: Tensor) -> None:
        """`run` is the backward pass of a loss. The first must find no gradients."""
        if not self.on_gpu:
            run(loss)
        elif self.strict is None:
            self._try(run, loss)
        else:
            with repeatable(self.strict):
                run(loss)

    def _try(self, run: Callable[..., object], loss: Tensor) -> None:
        try:
            with repeatable(True):
                run(loss, retain_graph=True)
            self.strict = True
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            print(f"training: another run on this GPU may differ in the last bits: {reason}", file=sys.stderr, flush=True)
            self.module.zero_grad(set_to_none=True)
            self.strict = False
            with repeatable(False):
                run(loss)
