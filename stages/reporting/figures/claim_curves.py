"""Learning curves of an experiment's arms: a panel per arm with a line per seed and their mean, beside the other arms' means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.reporting.style import colour, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("sft", "domain0", "domain1", "domain2", "domain3", "merged")
COLUMNS = 3
POINTS = 40
"""Points of a line: each is the mean over as many training steps as fall into a fortieth of the axis."""
PANEL = (3.1, 2.0)

Curve = tuple[np.ndarray, np.ndarray]
"""Places on the axis of training and values, [N] each."""


def binned(curve: Curve, end: float) -> np.ndarray:
    """Means of the values in POINTS equal parts of 0 to `end`; parts without a step lie on the line between their neighbours, and
    are nan after the last step."""
    places, values = curve
    index = np.minimum((places / end * POINTS).astype(int), POINTS - 1)
    counts = np.bincount(index, minlength=POINTS)
    sums = np.bincount(index, weights=values, minlength=POINTS)
    filled = np.flatnonzero(counts)
    return np.interp(np.arange(POINTS), filled, sums[filled] / counts[filled], right=np.nan)


def _mean(lines: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over the seeds that all have the part; nan where one has ended."""
    return np.mean(lines, axis=0)


def learning_curves(curves: Mapping[str, Sequence[Curve]], unit: str) -> Figure:
    """curves: arm -> success (shares) of each seed along training. unit: of the axis of training."""
    end = max(float(places[-1]) for of in curves.values() for places, _ in of) or 1.0
    lines = {arm: [100 * binned(curve, end) for curve in of] for arm, of in curves.items()}
    columns = 2 if len(lines) == 4 else min(COLUMNS, len(lines))
    rows = math.ceil(len(lines) / columns)
    figure, axes = new_figure((PANEL[0] * columns, PANEL[1] * rows), rows, columns, sharex=True, sharey=True)
    panels: list[Any] = [axes] if rows == columns == 1 else list(axes.flat)
    centres = (np.arange(POINTS) + 0.5) * end / POINTS
    for index, (arm, of) in enumerate(lines.items()):
        panel, own = panels[index], colour(COLOURS[index % len(COLOURS)])
        for other in lines:
            if other != arm:
                panel.plot(centres, _mean(lines[other]), color=colour("base"), linewidth=0.8, alpha=0.6)
        for line in of:
            panel.plot(centres, line, color=own, linewidth=0.6, alpha=0.55)
        panel.plot(centres, _mean(of), color=own, linewidth=2.2)
        panel.set_title(f"{arm} ({len(of)} seed{'s' * (len(of) > 1)})", color=own)
        panel.set_ylim(0, 100)
        panel.set_xlim(0, end)
        panel.locator_params(axis="x", nbins=5)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
        if index % columns == 0:
            panel.set_ylabel("success, %")
        if index + columns >= len(lines):
            panel.tick_params(labelbottom=True)
            panel.set_xlabel(unit, loc="left")
    for panel in panels[len(lines) :]:
        panel.set_axis_off()
    return figure
