"""Sums of micro-batches' gradients.

On a CPU each micro-batch's gradient is computed on its own, and they are added in the order of the micro-batches, so that it does
not matter which process computed which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stages.runtime.team import Team
    from stages.training.common.processes import Processes


class GradientSum(Protocol):
    def add(self, active: bool) -> None:
        """Called after the backward passes of each of this process's micro-batches. active: whether it had one, or waits for
        the others."""
        ...

    def finish(self) -> None:
        """Leave the sum over all processes in the parameters' `grad`."""
        ...


class AutogradSum:
    """Adds in place, as autograd does; over processes at the end."""

    def __init__(self, processes: Processes, parameters: Sequence[nn.Parameter]) -> None:
        self.processes, self.parameters = processes, parameters

    def add(self, active: bool) -> None:
        return None

    def finish(self) -> None:
        if self.processes.count == 1 or self.processes.sharded:  # FSDP has added them up
            return
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)


class OrderedSum:
    """In one process."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.total: dict[int, Tensor] = {}

    def add(self, active: bool) -> None:
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                if place in self.total:
                    self.total[place] += parameter.grad
                else:
                    self.total[place] = parameter.grad
                parameter.grad = None

    def finish(self) -> None:
        for place, parameter in enumerate(self.parameters):
            parameter.grad = self.total.get(place)


class TeamSum:
    """In a team. The processes compute one micro-batch each; then each adds the gradients of its share of the parameters, in
    order, to the sum in shared memory. Holds (processes + 1) times the parameters there, for all updates."""

    def __init__(self, team: Team, parameters: Sequence[nn.Parameter]) -> None:
        self.team, self.parameters = team, parameters
        size = sum(parameter.numel() for parameter in parameters)
        memory = torch.frombuffer(team.shared(4 * size * (team.count + 1)), dtype=torch.float32).view(team.count + 1, size)
        self.slots, self.total = memory[:-1], memory[-1]
        bounds = [size * index // team.count for index in range(team.count + 1)]
        self.own = slice(bounds[team.index], bounds[team.index + 1])
        self.started = False
        self.present = torch.zeros(len(parameters), dtype=torch.bool)

    def _write(self) -> None:
        start = 0
        for place, parameter in enumerate(self.parameters):
            target = self.slots[self.team.index, start : (start := start + parameter.numel())].view_as(parameter)
            if parameter.grad is None:
                target.zero_()
            else:
                target.copy_(parameter.grad)
                self.present[place] = True
            parameter.grad = None

    def add(self, active: bool) -> None:
        if active:
            self._write()
        for index, has_one in enumerate(self.team.gather(active)):
            if has_one and (self.started or index):
                self.total[self.own] += self.slots[index, self.own]
            elif has_one:
                self.total[self.own] = self.slots[index, self.own]
        self.started = True
        self.team.wait()  # before a slot is written again

    def finish(self) -> None:
        present, start = torch.stack(self.team.gather(self.present)).any(0), 0
        for place, parameter in enumerate(self.parameters):
            values = self.total[start : (start := start + parameter.numel())].view_as(parameter)
            parameter.grad = values.clone() if present[place] else None
        self.started = False
        self.present.zero_()
        self.team.wait()  # before the next update's sum is written
