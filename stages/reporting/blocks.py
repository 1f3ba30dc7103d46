"""What a section of the page is made of. Plain data: the templates decide how it looks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from stages.reporting.style import WIDE, Svg, drawing, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """One figure: inline SVG with a caption."""

    svg: Svg
    caption: str
    wide: bool


@dataclass(frozen=True)
class Figures:
    """Figures side by side where there is room; `legend` is (palette name, label) for what several of them share."""

    kind: ClassVar[str] = "figures"
    drawings: Sequence[Drawing]
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Table:
    """Cells are text; columns after the first `text_columns` are set flush right, but for those (from 0) in `left`. `folded`
    hides it behind its title."""

    kind: ClassVar[str] = "table"
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    left: Sequence[int] = ()
    grouped: bool = False
    """The first column is no column but a heading over the rows that share it."""
    folded: bool = False

    def groups(self) -> list[tuple[str, list[Sequence[str]]]]:
        """(heading, rows under it), in order; all rows under one where the table is not `grouped`."""
        if not self.grouped:
            return [("", list(self.rows))]
        return [(name, list(rows)) for name, rows in itertools.groupby(self.rows, key=lambda row: row[0])]

    def flush_right(self, column: int) -> bool:
        """Whether `column` (from 0) holds numbers."""
        return column >= self.text_columns and column not in self.left


@dataclass(frozen=True)
class Text:
    """A paragraph; `tone` "note" is for what is missing."""

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
    """Search trees to walk through: what `stages.reporting.trees.forest` packs. At most one on the page."""

    kind: ClassVar[str] = "trees"
    trees: Sequence[Mapping[str, Any]]
    asked: int
    """Trees that were chosen before the limit in bytes."""


Block = Figures | Table | Text | Heading | Code | TreeViewer


@dataclass
class Section:
    """One chapter of the page. `slug` is its anchor."""

    slug: str
    title: str
    intro: str
    blocks: list[Block] = field(default_factory=list)


def draw(key: str, caption: str, make: Callable[..., Figure], *arguments: Any, **options: Any) -> Drawing:
    """Make a figure with the page's settings and render it. `caption` is also what a screen reader says."""
    with drawing():
        figure = make(*arguments, **options)
        width, _ = figure.get_size_inches()
        return Drawing(to_svg(figure, key, caption), caption, wide=bool(width >= WIDE[0]))


def slug(text: str) -> str:
    """`text` in the letters that ids may have."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())


def missing(path: str, made_by: str) -> Text:
    """The sentence that stands for a figure whose input does not exist."""
    return Text(f"There is no {path}, which the stage {made_by} writes, so nothing is shown here.", tone="note")


def number(value: Any) -> str:
    """A number or other scalar as people write it: up to four significant digits, thousands separated, yes/no, – for nothing."""
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


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """All scalars of a JSON value as (dotted key, text); lists of scalars stay one entry; keys sorted as given."""
    if isinstance(value, Mapping):
        return [item for key, inner in value.items() for item in flatten(inner, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, (list, tuple)):
        if all(not isinstance(item, (Mapping, list, tuple)) for item in value):
            return [(prefix, ", ".join(number(item) for item in value) or "none")]
        return [item for place, inner in enumerate(value) for item in flatten(inner, f"{prefix}[{place}]")]
    return [(prefix, number(value))]


def all_numbers(report: Mapping[str, Any] | None, source: str, limit: int = 150) -> list[Block]:
    """A folded table of everything a stage's report holds (its first `limit` entries); nothing without a report."""
    if not report:
        return []
    entries = flatten(report)
    title = f"All numbers of {source}" + (f" (the first {limit} of {len(entries)})" if len(entries) > limit else "")
    return [Table(title, ("key", "value"), [list(entry) for entry in entries[:limit]], text_columns=2, folded=True)]
