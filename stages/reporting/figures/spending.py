"""Cost against success: a point per model or arm with its intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stages.reporting.style import colour, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("sft", "domain0", "domain1", "domain2", "domain3", "merged")
Estimate = Mapping[str, float]
"""`mean`, and `low` and `high` where there is an interval."""


def _bars(value: Estimate, scale: float) -> list[list[float]]:
    mean = value["mean"]
    return [[scale * (mean - value.get("low", mean))], [scale * (value.get("high", mean) - mean)]]


def spending(points: Mapping[str, tuple[Estimate, Estimate]], line: bool = False) -> Figure:
    """points: name -> (cost, success as a share). line: join them in their order, as a curve over a setting."""
    figure, axes = new_figure((5.2, 3.2))
    panel: Any = axes
    if line:
        ends = [(cost["mean"], 100 * success["mean"]) for cost, success in points.values()]
        panel.plot(*zip(*ends, strict=True), color=colour("base"), linewidth=0.9, zorder=1)
    for index, (name, (cost, success)) in enumerate(points.items()):
        own = colour(COLOURS[index % len(COLOURS)])
        place = (cost["mean"], 100 * success["mean"])
        panel.errorbar(*place, xerr=_bars(cost, 1.0), yerr=_bars(success, 100.0), fmt="o", color=own, markersize=5, linewidth=1)
        panel.annotate(name, place, xytext=(5, 5), textcoords="offset points", color=own)
    panel.set_ylim(0, 100)
    panel.set_xlim(left=0)
    panel.margins(x=0.15)
    panel.set_xlabel("cost per attempt", loc="left")
    panel.set_ylabel("success, %")
    return figure
