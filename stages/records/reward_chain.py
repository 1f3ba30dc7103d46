"""What a task's references demand of an answer, in a form that a program can check: key words in order, and demands on style."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """A demand with its weight. `check`: a function of ours; or `source`: one function of a text, written by a model, which runs
    in the sandbox only."""

    name: str
    weight: float
    check: Callable[[str], bool] | None = None
    source: str = ""


@dataclass(frozen=True)
class RewardChain:
    """`references`: I texts. `key_points[m][i]`: key words of point m for reference i. `styles`: their weights count relative to
    their sum."""

    references: tuple[str, ...]
    key_points: tuple[tuple[tuple[str, ...], ...], ...]
    styles: tuple[Style, ...] = ()

    def __post_init__(self) -> None:
        if any(len(point) != len(self.references) for point in self.key_points):
            raise ValueError(f"each key point needs a list of key words for each of the {len(self.references)} references")
        if any(style.weight < 0 or (style.check is None) == (not style.source) for style in self.styles):
            raise ValueError("each style needs a weight of at least 0, and either a function or its source")
