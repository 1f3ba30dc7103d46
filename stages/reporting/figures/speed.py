"""Figure of speed: what the processes of each stage did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.reporting.kept import Measured
from stages.reporting.style import WIDE, colour, new_figure
from stages.runtime.speed import PARTS, part_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = dict(
    zip(PARTS, ("domain3", "domain1", "sft", "merged", "domain0", "domain2", "base"), strict=True),
)
"""Part -> palette name."""


def stacked_parts(measured: Mapping[str, Measured]) -> Figure:
    """One bar per stage, as long as the stage took, divided by its processes' shares of PARTS."""
    figure, axes = new_figure((WIDE[0], 0.9 + 0.3 * len(measured)))
    longest = max(item.seconds for item in measured.values())
    unit, label = (60, "minutes") if longest >= 180 else (1, "seconds")
    for place, item in enumerate(measured.values()):
        seconds = part_seconds(item.spans)
        total, left = sum(seconds.values()), 0.0
        for part, value in seconds.items():
            width = item.seconds / unit * value / total
            axes.barh(place, width, left=left, height=0.66, color=colour(COLOURS[part]))
            left += width
        # The cores' time that no process used is what more workers, or stages side by side, could win.
        beside = {"textcoords": "offset points", "xytext": (6, 0), "va": "center", "fontsize": 8, "color": colour("muted")}
        use = f"{100 * item.cpu_seconds / item.seconds / item.cores:.0f} % of {item.cores} cores"
        axes.annotate(use, xy=(left, place), annotation_clip=False, **beside)
    axes.set_yticks(range(len(measured)), list(measured))
    axes.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axes.set_ylim(len(measured) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * longest / unit)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label, loc="left")
    return figure
