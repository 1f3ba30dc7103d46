"""Transitions and the replay buffer: flat arrays, the oldest transitions overwritten first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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

    @staticmethod
    def joined(parts: Sequence[Transitions]) -> Transitions:
        """All steps of the parts, in their order."""
        return Transitions(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Transitions)))


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


@dataclass(frozen=True)
class Demonstrations:
    """Recorded steps that an agent learns from beside its own; the replay buffer begins with them."""

    data: Transitions
    share: float
    """Of each batch that is drawn from the demonstrations alone."""

    def rows(self, count: int) -> int:
        """The first so many of a batch of `count` are demonstrations."""
        return round(self.share * count)

    def draw(self, replay: Replay, count: int, generator: torch.Generator) -> Transitions:
        """A batch: demonstrations, then steps of the replay buffer."""
        recorded = self.rows(count)
        chosen = torch.randint(len(self.data.reward), (recorded,), generator=generator)
        return Transitions.joined([self.data.at(chosen), replay.draw(count - recorded, generator)])

    def digest(self) -> str:
        """SHA-256 of the steps and the share."""
        found = hashlib.sha256(str(self.share).encode())
        for field in fields(self.data):
            found.update(getattr(self.data, field.name).contiguous().numpy().tobytes())
        return found.hexdigest()
