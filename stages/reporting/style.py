"""The palette of page and figures, and inline SVG that follows the reader's colour scheme.

Matplotlib draws with placeholder colours, which are then replaced by CSS variables for the light and the dark scheme. Text is
drawn as paths, ids depend on the figure alone and no date is written, so the same figure gives the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE: Mapping[str, tuple[str, str]] = {
    "surface": ("#ffffff", "#171b21"),
    "page": ("#f4f6f8", "#0f1216"),
    "ink": ("#1b1f24", "#e9ecef"),
    "muted": ("#57606a", "#a2acb8"),
    "grid": ("#dfe3e8", "#323a44"),
    "base": ("#7c858f", "#8f99a5"),
    "sft": ("#2a78d6", "#5aa2f2"),
    "merged": ("#4a3aa7", "#d6c9ff"),
    "domain0": ("#d4570f", "#f2894a"),
    "domain1": ("#0a8467", "#35b995"),
    "domain2": ("#b83a78", "#ea86b6"),
    "domain3": ("#8a6a00", "#d9ab2b"),
    "on_accent": ("#ffffff", "#10141a"),
}
"""Name -> (light, dark). Mark colours have at least 3:1 contrast with `surface` in both schemes."""

DOMAIN_COLOURS = 4
_PLACEHOLDERS = {name: f"#fe{index:02x}c7" for index, name in enumerate(PALETTE)}
_MARKERS = ("o", "s", "D", "^")
_DASHES = ("-", "--", "-.", ":")

STANDALONE_MARGIN = 12
"""Margin of a standalone figure, in points."""
WIDEST = 1.75
"""Most CSS pixels of a page per point of a figure."""

LEGEND_LETTERS = 62
"""Characters that fit into the title line of a card."""

STYLE = Path(__file__).resolve().parent / "templates" / "figures.mplstyle"
WIDE = (7.6, 3.2)
CARD = (4.7, 2.9)
"""Figure sizes in inches: full width, and one grid cell."""


def colour(name: str) -> str:
    """The placeholder of palette colour `name` for matplotlib."""
    return _PLACEHOLDERS[name]


def domain_colour(index: int) -> str:
    """Palette name of the `index`-th domain; colours repeat after four, with another dash and marker."""
    return f"domain{index % DOMAIN_COLOURS}"


def domain_line(index: int) -> dict[str, Any]:
    """Line and marker style of the `index`-th domain."""
    return {
        "color": colour(domain_colour(index)),
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[(index // DOMAIN_COLOURS + index) % len(_DASHES)],
    }


def css_name(name: str) -> str:
    """CSS variable of palette colour `name`."""
    return f"--{name.replace('_', '-')}"


def css_variables(scheme: int) -> str:
    """CSS declarations of the palette; scheme 0 is light, 1 dark."""
    return " ".join(f"{css_name(name)}: {pair[scheme]};" for name, pair in PALETTE.items())


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib settings; figures must be made and rendered inside."""
    import matplotlib

    matplotlib.use("Agg")
    ink = dict.fromkeys(("text.color", "axes.titlecolor"), colour("ink"))
    muted = dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), colour("muted"))
    grid = dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor", "grid.color"), colour("grid"))
    settings: Any = {**ink, **muted, **grid}
    defaults: Any = dict(matplotlib.rcParamsDefault)
    with matplotlib.rc_context(rc=defaults), matplotlib.rc_context(rc=settings, fname=STYLE):
        yield


def new_figure(size: tuple[float, float] = CARD, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure outside pyplot and its axes: one Axes, or an array [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes[0, 0] if rows == columns == 1 else axes


def legend_above(axes: Any) -> None:
    """A legend right-aligned in the title line; inside the axes if it does not fit."""
    labels = axes.get_legend_handles_labels()[1]
    if 1.3 * len(axes.get_title(loc="left")) + sum(len(label) + 5 for label in labels) > LEGEND_LETTERS:
        axes.legend(loc="best")
        return
    spacing = {"columnspacing": 1.0, "handlelength": 1.4, "handletextpad": 0.4, "borderpad": 0.2}
    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=len(labels), **spacing)


@dataclass(frozen=True)
class Svg:
    """An `<svg>` element and its glyphs (id -> `<path>`), which the page defines once for all figures."""

    text: str
    glyphs: Mapping[str, str]
    frame: str = ""
    """CSS of a frame as large as the figure at most gets, by which the page can leave it undrawn until it comes near."""


_GLYPH = re.compile(r'<path id="(DejaVu[^"]+)"[^>]*/>')
_COORDINATES = re.compile(r'\b(?:d|x|y)="[^"]*"|translate\([^)]*\)')
_LONG = re.compile(r"(\d+\.\d{2})\d+")


def _compact(text: str) -> str:
    """`text` without comments, metadata and redundant white space, coordinates rounded to 0.01 points."""
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r">\s+<", "><", re.sub(r"\s+", " ", text)).replace("<defs></defs>", "").replace(' "', '"')
    return _COORDINATES.sub(lambda found: _LONG.sub(r"\1", found.group(0)), text)


def _drawn(figure: Figure) -> str:
    """The SVG file that `figure.savefig` writes; that would draw the figure once more to place the axes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvas, buffer = FigureCanvasSVG(figure), io.StringIO()
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        figure.set_layout_engine("none")
    canvas.print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return buffer.getvalue()


def to_svg(figure: Figure, key: str, title: str, standalone: bool = False) -> Svg:
    """`figure` as one `<svg>` element with colours as CSS variables.

    `key` ([a-z0-9-]+, unique on the page) prefixes all ids except glyphs; `title` is the accessible name. A `standalone` file
    includes glyphs, palette and background; an inline one uses those of the page.
    """
    if not re.fullmatch(r"[a-z0-9-]+", key):
        raise ValueError(f"figure key {key!r} must be made of a-z, 0-9 and '-'")
    text = _drawn(figure)
    text = _compact(text[text.index("<svg") :]).replace("xlink:href", "href")
    glyphs = {found.group(1): found.group(0) for found in _GLYPH.finditer(text)}
    if not standalone:
        text = _GLYPH.sub("", text).replace("<defs></defs>", "")
    text = re.sub(r'\bid="(?!DejaVu)([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", text)
    text = re.sub(r'href="#(?!DejaVu)([^"]+)"', rf'href="#{key}-\1"', text)
    for name, placeholder in _PLACEHOLDERS.items():
        text = text.replace(placeholder, f"var({css_name(name)})")
    margin = STANDALONE_MARGIN if standalone else 0
    width, height = (f"{inches * 72 + 2 * margin:g}" for inches in figure.get_size_inches())
    widest = f"max-width: {float(width) * WIDEST:g}px"
    box = f"{-margin:g} {-margin:g} {width} {height}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label={quoteattr(title)}'
    if standalone:
        dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {css_variables(1)} }} }}"
        head += (
            f' width="{width}pt" height="{height}pt"><style>svg {{ {css_variables(0)} }} {dark}</style>'
            f'<rect x="{-margin:g}" y="{-margin:g}" width="{width}" height="{height}" rx="8" style="fill: var(--surface)"/>'
        )
    else:
        head += f' style="{widest}">'
    text = re.sub(r"<svg[^>]*>", lambda _: head, text, count=1).strip() + "\n"
    return Svg(text, glyphs, f"--ratio: {width} / {height}; {widest}")
