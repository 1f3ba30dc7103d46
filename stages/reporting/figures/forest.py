"""The forest plot of the board: the difference of every judged claim with its interval, by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.reporting.style import colour, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    "reproduced": ("o", "domain1", True),
    "not reproduced": ("X", "domain0", True),
    "undecided": ("D", "base", False),
}
"""Verdict -> marker, colour, filled."""
WIDTH = 9.2
ROW = 0.155
"""Height of a row in inches."""
AROUND, LEGEND = 0.95, 0.3
"""Height of a panel's title and axes, and of the legend, in inches."""


@dataclass(frozen=True)
class Mark:
    """A claim's difference with its interval and margin, all in the panel's unit."""

    label: str
    verdict: str
    difference: float
    low: float
    high: float
    margin: float


@dataclass(frozen=True)
class Panel:
    """Claims of one unit by family. limit: of the axis on both sides; intervals that go beyond end with an arrow."""

    title: str
    unit: str
    families: Mapping[str, Sequence[Mark]]
    limit: float

    @property
    def rows(self) -> int:
        return sum(1 + len(marks) for marks in self.families.values())


def _interval(axes: Any, place: int, mark: Mark, limit: float) -> None:
    marker, name, filled = STYLES[mark.verdict]
    tint = colour(name)
    axes.barh(place, 2 * mark.margin, left=-mark.margin, height=0.7, color=colour("grid"), linewidth=0)
    axes.plot([max(mark.low, -limit), min(mark.high, limit)], [place, place], color=tint, linewidth=1.5, solid_capstyle="butt")
    for end, arrow, beyond in ((-limit, "<", mark.low < -limit), (limit, ">", mark.high > limit)):
        if beyond:
            axes.plot([end], [place], marker=arrow, color=tint, markersize=5, clip_on=False)
    if abs(mark.difference) <= limit:
        face = tint if filled else colour("surface")
        axes.plot([mark.difference], [place], marker=marker, color=tint, markerfacecolor=face, markersize=5.2)


def _panel(axes: Any, panel: Panel) -> None:
    place, labels = 0, {}
    for family, marks in panel.families.items():
        labels[place] = family
        for mark in marks:
            place += 1
            labels[place] = mark.label
            _interval(axes, place, mark, panel.limit)
        place += 1
    axes.axvline(0, color=colour("muted"), linewidth=1, zorder=0.9)
    axes.set_yticks(list(labels), list(labels.values()))
    headings = set(panel.families)
    for text in axes.get_yticklabels():
        text.set_fontsize(7.6)
        text.set_color(colour("ink"))
        if text.get_text() in headings:
            text.set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labeltop=True)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(place - 0.3, -0.7)
    axes.set_xlim(-panel.limit, panel.limit)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.unit, loc="left")


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for verdict, (marker, name, filled) in STYLES.items():
        face = colour(name) if filled else colour("surface")
        handles.append(Line2D([], [], color=colour(name), marker=marker, markerfacecolor=face, markersize=5.2, label=verdict))
    handles.append(Patch(color=colour("grid"), label="within the margin"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), columnspacing=1.4)


def forest(panels: Sequence[Panel]) -> Figure:
    """One panel below the other, all rows of equal height."""
    height = LEGEND + sum(AROUND + ROW * panel.rows for panel in panels)
    ratios = {"height_ratios": [panel.rows + 0.4 for panel in panels]}
    figure, axes = new_figure((WIDTH, height), len(panels), gridspec_kw=ratios)
    for one, panel in zip([axes] if len(panels) == 1 else axes[:, 0], panels, strict=True):
        _panel(one, panel)
    _legend(figure)
    return figure
