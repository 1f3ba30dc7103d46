"""How the processes that `accelerate launch` starts share the work of one training run.

With one process, nothing here changes a bit. With several (DDP), each takes every n-th micro-batch or episode group, and results
are summed or gathered, so that all processes hold the same weights, statistics and batches. Under FSDP, weights, gradients and
optimiser moments are sharded as well. Layers gather their weights as they are reached, so all processes must make the same number
of passes: those with fewer micro-batches repeat one with weight 0.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from accelerate import Accelerator

Item = TypeVar("Item")
FSDP_SWITCH = "ACCELERATE_USE_FSDP"
"""Set by `accelerate launch` for a configuration with distributed_type FSDP."""


class _Root(nn.Module):
    """Runs any function as the forward pass of `module`, so that FSDP's hooks run around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class Processes:
    """The processes of `accelerator`'s run, seen from this one."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.count, self.index = accelerator.num_processes, accelerator.process_index
        self.sharded = self.count > 1 and os.environ.get(FSDP_SWITCH, "false").lower() == "true"
        self._roots: dict[int, _Root] = {}

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def mixed_precision(self) -> bool:
        """Whether training passes compute in less than float32 (resources.precision)."""
        return self.accelerator.mixed_precision != "no"

    def shard(self, items: Sequence[Item]) -> list[tuple[Item, bool]]:
        """This process's shard of the items, every n-th, each with True. Under FSDP it is padded with items marked False, so that
        all processes make the same number of passes."""
        own = [(item, True) for item in items[self.index :: self.count]]
        if self.sharded:
            own += [(items[0], False)] * (-(-len(items) // self.count) - len(own))
        return own

    def gather(self, own: Sequence[Item]) -> list[Item]:
        """All processes' lists, concatenated; the same in each process."""
        if self.count == 1:
            return list(own)
        from accelerate.utils import gather_object

        return gather_object(list(own))

    def place(self, module: nn.Module) -> nn.Module:
        """The module on this process's device, with its parameters sharded under FSDP. FSDP replaces the parameters, so make the
        optimiser afterwards. Raises ValueError for a module with frozen parameters under FSDP."""
        module.to(self.device)
        if not self.sharded:
            return module
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        if not all(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                "FSDP shards trained parameters, and with model.lora these are few: use profiles/accelerate/ddp.yaml, or set "
                "model.lora.rank to 0"
            )
        mesh = init_device_mesh(self.device.type, (self.count,))
        for layer in module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self._roots[id(module)] = fully_shard(_Root(module), mesh=mesh, reshard_after_forward=True)
        return module

    def run_in_fsdp(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """`function()`, which computes with `module`; FSDP gathers the module's sharded parameters for it."""
        root = self._roots.get(id(module))
        return function() if root is None else root(function)

    def forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """`run_in_fsdp` in the training precision. All numbers that a loss compares must come from such passes."""

        def compute() -> Any:
            with self.accelerator.autocast():
                return function()

        return self.run_in_fsdp(module, compute)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up gradients over all processes, in place. FSDP has already done so."""
        if self.count == 1 or self.sharded:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def replica(self, module: Any) -> Any:
        """An unsharded copy of a module that is about to be sharded, to play and to save with; without FSDP the module itself."""
        return copy.deepcopy(module) if self.sharded else module

    def refresh(self, replica: Any, module: Any) -> None:
        """Copy the module's current weights into its `replica`."""
        if replica is module:
            return
        with torch.no_grad():
            for target, source in zip(replica.parameters(), module.parameters(), strict=True):
                target.copy_(gather_full(source))


def gather_full(value: Any) -> Any:
    """`value` with every sharded tensor in it gathered on the CPU. Every process must make this call."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: gather_full(item) for key, item in value.items()}
    if isinstance(value, list):
        return [gather_full(item) for item in value]
    return value


def shard_like(value: Any, pattern: Any) -> Any:
    """A full tensor sharded as `pattern` is; anything else unchanged."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(pattern, DTensor) and isinstance(value, Tensor) and value.shape == pattern.shape:
        return distribute_tensor(value.to(pattern.device), pattern.device_mesh, pattern.placements)
    return value
