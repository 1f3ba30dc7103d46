"""Transitions and the replay buffer: flat arrays, the oldest transitions overwritten first."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transitions:
    """B steps."""

    observation: Tensor
    """[B, S]."""
    action: Tensor
    """[B, A], between -1 and 1; or numbers of actions, [B, 1]."""
    reward: Tensor
    """[B]."""
    following: Tensor
    """[B, S]: the next observation."""
    terminated: Tensor
    """[B]: 1.0 where no reward can follow; 0.0 where only the time was up."""

    def at(self, rows: Tensor) -> Transitions:
        return Transitions(*(getattr(self, field.name)[rows] for field in fields(self)))


class Replay:
    """At most `capacity` transitions."""

    def __init__(self, capacity: int, observations: int, actions: int) -> None:
        shapes = ((observations,), (actions,), (), (observations,), ())
        self.kept = Transitions(*(torch.zeros(capacity, *shape) for shape in shapes))
        self.capacity, self.added = capacity, 0

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, more: Transitions) -> None:
        rows = torch.arange(self.added, self.added + len(more.reward)) % self.capacity
        for field in fields(more):
            getattr(self.kept, field.name)[rows] = getattr(more, field.name)
        self.added += len(more.reward)

    def draw(self, count: int, generator: torch.Generator) -> Transitions:
        """`count` transitions, with replacement."""
        return self.kept.at(torch.randint(len(self), (count,), generator=generator))

    def everything(self) -> Transitions:
        """All transitions kept, in the order of their rows."""
        return self.kept.at(torch.arange(len(self)))

    def state(self) -> dict[str, Tensor | int]:
        """What `restore` takes."""
        filled = {field.name: getattr(self.kept, field.name)[: len(self)].clone() for field in fields(self.kept)}
        return {**filled, "added": self.added}

    def restore(self, state: dict[str, Tensor | int]) -> None:
        self.added = int(state["added"])
        for field in fields(self.kept):
            getattr(self.kept, field.name)[: len(self)] = state[field.name]
