"""Learning curves of lane control, and what is lacked beside the bound of it."""

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


def bound_curves(episodes: Sequence[int], lacking: Sequence[Sequence[float]], bounds: Sequence[Sequence[float]]) -> Figure:
    """Suboptimality of each seed, and its mean, beside the mean bound, by the number of episodes [N]; both [N, R]."""
    figure, axes = new_figure(WIDE)
    for number, (title, values) in enumerate((("bound", bounds), ("suboptimality", lacking))):
        style = domain_line(number)
        axes.plot(episodes, [sum(of) / len(of) for of in values], label=title, **style)
        for place, of in zip(episodes, values, strict=True):
            axes.plot([place] * len(of), of, linestyle="none", marker="o", markersize=3, color=style["color"], alpha=0.5)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("episodes")
    axes.set_title("Worst case below the best policy's, and its bound")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
