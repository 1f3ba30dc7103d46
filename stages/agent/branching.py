"""The interface by which a method branches episodes off others of their group.

A group is played in rounds: all its running episodes take one turn, then the `Plan` chooses new branches. So its decisions depend
only on the group, not on what else is played or on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Path:
    """An episode of a group as a plan sees it. Rows are numbered in starting order."""

    row: int
    inherited: int
    """Turns inherited from the episode that it branched off; 0 if it started from the task."""
    entropies: tuple[tuple[float, ...], ...]
    """Per turn, inherited ones included: entropy before each of the turn's tokens, nats, over the plan's `candidates`."""
    moved: bool
    """Whether it took a turn in this round."""
    alive: bool


@dataclass(frozen=True)
class Fork:
    """A new episode that inherits the first `turns` turns (at least 1) of `row`, with the observation after the last one."""

    row: int
    turns: int


class Plan(Protocol):
    """Decides how a group branches. Must depend only on its arguments."""

    candidates: int
    """Most likely tokens that entropies are computed over; 0 for a plan without entropies."""

    def initial(self, size: int) -> int:
        """How many of a group's `size` episodes start from the task at once, at least 1."""
        ...

    def grow(self, paths: Sequence[Path], free: int, *key: object) -> list[Fork]:
        """New branches after a round: at most `free` forks of rows that moved in it. `key` keys the group's random draws.

        If no episode is running and none branches off, all free episodes start from the task, without further rounds.
        """
        ...
