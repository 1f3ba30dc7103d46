"""How a group of episodes is played where some are branches of others: the contract between a collection and what decides.

A group goes in rounds: all its living episodes take one turn, then the `Plan` says which new ones branch off, and where. So the
decision depends on the group alone, whatever is played beside it and however long anything takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Path:
    """An episode of a group, as a plan sees it. Rows are numbered in the order in which they start."""

    row: int
    inherited: int
    """Turns taken over from the episode that it is a branch of; 0 for one that started from the task."""
    entropies: tuple[tuple[float, ...], ...]
    """Per turn, those taken over included: entropy before each of the turn's tokens, nats, over the plan's `candidates`."""
    moved: bool
    """Whether it took a turn in this round."""
    alive: bool


@dataclass(frozen=True)
class Fork:
    """A new episode that takes over the first `turns` turns (at least 1) of `row`, the answer to the last of them included."""

    row: int
    turns: int


class Plan(Protocol):
    """Decides how a group is played. Must depend on its arguments alone."""

    candidates: int
    """Most likely tokens that entropies are taken over; 0 for a plan that needs none."""

    def initial(self, size: int) -> int:
        """How many of a group's `size` episodes start from the task at once, at least 1."""
        ...

    def grow(self, paths: Sequence[Path], free: int, *key: object) -> list[Fork]:
        """What branches off after a round: at most `free` forks of rows that moved in it. `key` names the group's random draws.

        Where nobody lives and nothing branches off, all free episodes start from the task, and the group is left to itself.
        """
        ...
