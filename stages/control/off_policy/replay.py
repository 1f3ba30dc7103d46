"""Transitions and the replay buffer: flat arrays, the oldest transitions overwritten first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from stages.control.columns import parts, side_by_side


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
    def joined(several: Sequence[Transitions]) -> Transitions:
        """All their steps, in their order."""
        return Transitions(*(torch.cat([getattr(one, field.name) for one in several]) for field in fields(Transitions)))


class Replay:
    """At most `capacity` transitions."""

    def __init__(self, capacity: int, observations: int, actions: int) -> None:
        self.widths = (observations, actions, None, observations, None)
        self.rows = torch.zeros(capacity, sum(width or 1 for width in self.widths))
        self.capacity, self.added = capacity, 0

    @classmethod
    def of(cls, data: Transitions) -> Replay:
        """One that holds these transitions."""
        made = cls(len(data.reward), data.observation.shape[1], data.action.shape[1])
        made.add(data)
        return made

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    @property
    def kept(self) -> Transitions:
        """A view of all rows, of which `len` are in use."""
        return Transitions(*parts(self.rows, self.widths))

    def add(self, more: Transitions) -> None:
        rows = torch.arange(self.added, self.added + len(more.reward)) % self.capacity
        self.rows[rows] = side_by_side([getattr(more, field.name) for field in fields(more)])
        self.added += len(more.reward)

    def draw(self, count: int, generator: torch.Generator) -> Transitions:
        """`count` transitions, with replacement."""
        rows = self.rows.index_select(0, torch.randint(len(self), (count,), generator=generator))
        return Transitions(*parts(rows, self.widths))

    def everything(self) -> Transitions:
        """A view of all transitions kept, in the order of their rows."""
        return Transitions(*parts(self.rows[: len(self)], self.widths))

    def state(self) -> dict[str, Tensor | int]:
        """What `restore` takes."""
        return {"rows": self.rows[: len(self)].clone(), "added": self.added}

    def restore(self, state: dict[str, Tensor | int]) -> None:
        self.added = int(state["added"])
        self.rows[: len(self)] = state["rows"]


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
