"""Learning curves of lane control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stages.evaluation.aggregates import Bounded
from stages.reporting.style import WIDE, domain_line, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def control_curves(curves: Mapping[str, tuple[Sequence[int], Sequence[Bounded]]], across: str) -> Figure:
    """Title -> (steps, interquartile means with intervals); `across`: name of the horizontal axis."""
    figure, axes = new_figure(WIDE)
    for number, (title, (steps, points)) in enumerate(curves.items()):
        style = domain_line(number)
        axes.plot(steps, [point.value for point in points], label=title, **style)
        low, high = [point.low for point in points], [point.high for point in points]
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel(across)
    axes.set_title("Mean return")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
