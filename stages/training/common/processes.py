"""How the processes of one training run share its work.

On a CPU they are a team (stages.runtime.team), and their number changes no bit. With those that `accelerate launch` starts (DDP),
too, each takes every n-th micro-batch or episode group, and results are summed or gathered, so that all processes hold the same
weights, statistics and batches; their sums of gradients differ in the last bits. Under FSDP, weights, gradients and
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

from stages.runtime.spans import span
from stages.runtime.unshardable import LORA
from stages.training.common.gradients import AutogradSum, GradientSum, OrderedSum, TeamSum
from stages.training.common.repeatable import without_cudnn_attention

if TYPE_CHECKING:
    from accelerate import Accelerator

    from stages.runtime.team import Team

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
    """The processes of `accelerator`'s run, or a team of processes without accelerate, seen from this one."""

    def __init__(self, accelerator: Accelerator, team: Team | None = None) -> None:
        self.accelerator, self.team = accelerator, team
        self.count, self.index = accelerator.num_processes, accelerator.process_index
        if team is not None:
            self.count, self.index = team.count, team.index
        self.sharded = self.count > 1 and os.environ.get(FSDP_SWITCH, "false").lower() == "true"
        self._roots: dict[int, _Root] = {}
        self._sums: dict[tuple[int, ...], TeamSum] = {}

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

    def waiting_rounds(self, count: int) -> int:
        """Of `count` items that `shard` divides: in how many rounds this process of a team has none while others have."""
        return -(-count // self.count) - len(range(self.index, count, self.count)) if self.team is not None else 0

    def gather(self, own: Sequence[Item]) -> list[Item]:
        """All processes' lists, one item of each in turn, which restores the order of items before `shard`; the same in each
        process."""
        if self.count == 1:
            return list(own)
        if self.team is not None:
            lists = self.team.gather(list(own))
        else:
            from accelerate.utils import gather_object

            lists = gather_object([list(own)])
        return [items[turn] for turn in range(max(map(len, lists))) for items in lists if turn < len(items)]

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
            raise ValueError(LORA)
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

    @span("training.forward")
    def forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """`run_in_fsdp` in the training precision. All numbers that a loss compares must come from such passes."""

        def compute() -> Any:
            with self.accelerator.autocast(), without_cudnn_attention(self.device):
                return function()

        return self.run_in_fsdp(module, compute)

    @property
    def least(self) -> int:
        """Micro-batches to divide an update into, so that all processes have work. On one CPU always two, since the number of a
        team's processes must not change them, and halves cost no more than the whole."""
        halves = 2 if self.device.type == "cpu" else 1
        return halves if self.team is not None else max(halves, self.count)

    def gradient_sum(self, parameters: Sequence[nn.Parameter]) -> GradientSum:
        """Adds up the gradients of the update that is about to start."""
        if self.device.type != "cpu" or (self.count > 1 and self.team is None):
            return AutogradSum(self, parameters)
        if self.team is None:
            return OrderedSum(parameters)
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._sums:
            self._sums[key] = TeamSum(self.team, parameters)
        return self._sums[key]

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
