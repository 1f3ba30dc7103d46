"""The building blocks of a section, as plain data for the templates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from stages.reporting.style import WIDE, Svg, drawing, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Link(str):
    """A table's cell that leads to `href`."""

    href: str

    def __new__(cls, text: str, href: str) -> Link:
        made = super().__new__(cls, text)
        made.href = href
        return made


@dataclass(frozen=True)
class Drawing:
    """One figure: inline SVG with a caption."""

    svg: Svg
    caption: str
    wide: bool


@dataclass(frozen=True)
class Figures:
    """Figures in a grid; `legend`: (palette name, label) of what they share."""

    kind: ClassVar[str] = "figures"
    drawings: Sequence[Drawing]
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Table:
    """Columns after the first `text_columns` are right-aligned, except those (from 0) in `left`. `folded`: behind its title."""

    kind: ClassVar[str] = "table"
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    left: Sequence[int] = ()
    grouped: bool = False
    """Whether the first column is a heading over the rows that share its value."""
    folded: bool = False

    def groups(self) -> list[tuple[str, list[Sequence[str]]]]:
        """(heading, its rows), in order; one group with an empty heading if not `grouped`."""
        if not self.grouped:
            return [("", list(self.rows))]
        return [(name, list(rows)) for name, rows in itertools.groupby(self.rows, key=lambda row: row[0])]

    def right_aligned(self, column: int) -> bool:
        """Whether `column` (from 0) is right-aligned."""
        return column >= self.text_columns and column not in self.left


@dataclass(frozen=True)
class Text:
    """A paragraph; `tone` "note" is for missing inputs, "fine" for small print."""

    kind: ClassVar[str] = "text"
    text: str
    tone: str = "plain"


@dataclass(frozen=True)
class Heading:
    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Code:
    """Preformatted text behind its title."""

    kind: ClassVar[str] = "code"
    title: str
    text: str


@dataclass(frozen=True)
class TreeViewer:
    """Interactive search trees, packed by `stages.reporting.trees.forest`. At most one on the page."""

    kind: ClassVar[str] = "trees"
    trees: Sequence[Mapping[str, Any]]
    chosen: int
    """Number of trees chosen before the limit in bytes."""


Block = Figures | Table | Text | Heading | Code | TreeViewer


@dataclass
class Section:
    """A chapter of the page; `slug` is its anchor."""

    slug: str
    title: str
    intro: str
    blocks: list[Block] = field(default_factory=list)


def draw(key: str, caption: str, make: Callable[..., Figure], *arguments: Any, **options: Any) -> Drawing:
    """Make a figure with the page's settings and render it. `caption` is also its accessible name."""
    with drawing():
        figure = make(*arguments, **options)
        width, _ = figure.get_size_inches()
        return Drawing(to_svg(figure, key, caption), caption, wide=bool(width >= WIDE[0]))


def slug(text: str) -> str:
    """`text` as an HTML id."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())


def missing(path: str, made_by: str) -> Text:
    """A note in place of a figure whose input does not exist."""
    return Text(f"Not shown: {path} does not exist; stage {made_by} writes it.", tone="note")


def number(value: Any) -> str:
    """A scalar as text: up to four significant digits, thousands separators, yes/no, – for None and NaN."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "–"
        if value == int(value) and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)


def percent(share: float | None) -> str:
    """0.123 -> 12.3 %; a dash for None."""
    return "–" if share is None else f"{100 * share:.1f} %"


def rounded(value: float | None, digits: int = 3) -> float | int | None:
    """A rounded number for JSON, an int if whole; None if not finite."""
    if value is None or not math.isfinite(value):
        return None
    result = round(float(value), digits)
    return int(result) if result == int(result) else result


def scalars(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """The scalars of a JSON value as (dotted key, text), in order; a list of scalars is one entry."""
    if isinstance(value, Mapping):
        return [item for key, inner in value.items() for item in scalars(inner, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, (list, tuple)):
        if all(not isinstance(item, (Mapping, list, tuple)) for item in value):
            return [(prefix, ", ".join(number(item) for item in value) or "none")]
        return [item for place, inner in enumerate(value) for item in scalars(inner, f"{prefix}[{place}]")]
    return [(prefix, number(value))]


def all_numbers(report: Mapping[str, Any] | None, source: str, limit: int = 150) -> list[Block]:
    """A folded table of the first `limit` entries of a stage's report; [] without a report."""
    if not report:
        return []
    entries = scalars(report)
    title = f"All numbers of {source}" + (f" (the first {limit} of {len(entries)})" if len(entries) > limit else "")
    return [Table(title, ("key", "value"), [list(entry) for entry in entries[:limit]], text_columns=2, folded=True)]
