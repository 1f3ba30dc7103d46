"""How a group of episodes is played where some are branches of others: the contract between a collection and what decides.

A group goes in rounds: all its living episodes take one turn, then the `Plan` says which new ones branch off, and where. So the
decision depends on the group alone, whatever is played beside it and however long anything takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


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

        Where nobody lives and nothing branches off, one of the free episodes starts from the task.
        """
        ...


@dataclass
class Mark:
    """Where an episode stood after one of its turns, the answer included: what a branch starts from."""

    snapshot: Any
    """The environment's; None where the episode ended."""
    state_key: str
    terms: dict[str, float]
    tokens: int


@dataclass
class Group:
    """A group under way: `reserve` holds the requests not started yet, the next one last."""

    name: str
    reserve: list[Any]
    waiting_for: int
    """Episodes of the round that have not taken their turn."""
    key: tuple[object, ...]
    members: list[Any] = field(default_factory=list)
    """Its episodes under way or over, by row."""
    moved: set[int] = field(default_factory=set)
    leaving: list[Any] = field(default_factory=list)
    """Members that ended in this round; their sessions stay open until the plan has decided."""
