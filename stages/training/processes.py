"""How the processes that `accelerate launch` starts share the work of one training run.

One process: nothing here changes a bit. Several (DDP): each takes every n-th micro-batch, episode group and the like, and results
are summed or gathered, so that all of them hold the same weights, statistics and batches. Under FSDP weights, gradients and the
optimiser's moments are split over the processes besides; layers gather their weights as they are reached, for which all
processes have to make the same passes: those with fewer micro-batches repeat one with weight 0.
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
    """Runs any function as the forward pass of `module`, so that FSDP's hooks surround all that the function does with it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class Processes:
    """The processes of `accelerator`'s run, and this one among them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.count, self.index = accelerator.num_processes, accelerator.process_index
        self.sharded = self.count > 1 and os.environ.get(FSDP_SWITCH, "false").lower() == "true"
        self._roots: dict[int, _Root] = {}

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def mine(self, items: Sequence[Item]) -> list[tuple[Item, bool]]:
        """This process's items, every n-th, each with True; under FSDP some may come again with False, to make the same number
        of passes as the others."""
        own = [(item, True) for item in items[self.index :: self.count]]
        if self.sharded:
            own += [(items[0], False)] * (-(-len(items) // self.count) - len(own))
        return own

    def gather(self, own: Sequence[Item]) -> list[Item]:
        """All processes' lists one after another, the same in each process."""
        if self.count == 1:
            return list(own)
        from accelerate.utils import gather_object

        return gather_object(list(own))

    def place(self, module: nn.Module) -> nn.Module:
        """The module on this process's device, under FSDP with its parameters split. Optimisers are made after this, which puts
        other parameters into the module. Raises ValueError for parameters that FSDP cannot keep together."""
        module.to(self.device)
        if not self.sharded:
            return module
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        if not all(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                "FSDP splits what is trained, and with model.lora that is small: use profiles/accelerate/ddp.yaml, or set "
                "model.lora.rank to 0"
            )
        mesh = init_device_mesh(self.device.type, (self.count,))
        for layer in module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self._roots[id(module)] = fully_shard(_Root(module), mesh=mesh, reshard_after_forward=True)
        return module

    def inside(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """`function()`, which computes with `module`; its tensors are gathered for it where they are split."""
        root = self._roots.get(id(module))
        return function() if root is None else root(function)

    @property
    def mixed(self) -> bool:
        """Whether passes that are trained through compute in less than float32 (resources.precision)."""
        return self.accelerator.mixed_precision != "no"

    def forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """`inside`, in the precision that is trained in: numbers that a loss compares must all come from such passes."""

        def compute() -> Any:
            with self.accelerator.autocast():
                return function()

        return self.inside(module, compute)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up gradients over all processes, in place; FSDP has done so already."""
        if self.count == 1 or self.sharded:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def replica(self, module: Any) -> Any:
        """A whole copy of a module that is about to be split, to play and to save with; the module itself where nothing is."""
        return copy.deepcopy(module) if self.sharded else module

    def refresh(self, replica: Any, module: Any) -> None:
        """Give a `replica` the module's present weights."""
        if replica is module:
            return
        with torch.no_grad():
            for target, source in zip(replica.parameters(), module.parameters(), strict=True):
                target.copy_(whole(source))


def whole(value: Any) -> Any:
    """`value` with every split tensor in it put together, on the CPU; the same call in every process."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value


def split_like(value: Any, pattern: Any) -> Any:
    """A whole tensor split as `pattern` is; anything that `pattern`'s split has no say in stays as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(pattern, DTensor) and isinstance(value, Tensor) and value.shape == pattern.shape:
        return distribute_tensor(value.to(pattern.device), pattern.device_mesh, pattern.placements)
    return value
