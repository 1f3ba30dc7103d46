"""The learning curve on a method's page: the method in front of others that were run alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from stages.reporting.figures.claim_curves import Curve
from stages.reporting.figures.curves import running_mean
from stages.reporting.style import WIDE, colour, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("-", "--", ":", "-.")


def method_curve(curves: Mapping[str, Curve], method: str, baseline: str | None, axes_titles: tuple[str, str]) -> Figure:
    """curves: name -> (places, values); all but `method` and `baseline` are drawn thin and unnamed. axes_titles: what is shown,
    and the axis of training."""
    figure, axes = new_figure(WIDE)
    for name, (places, values) in curves.items():
        if name not in (method, baseline):
            axes.plot(places, running_mean(list(values)), color=colour("base"), linewidth=0.7, alpha=0.35)
    if baseline in curves and baseline != method:
        places, values = curves[baseline]
        axes.plot(places, running_mean(list(values)), color=colour("ink"), linewidth=1.6, linestyle="--", label=baseline)
    places, values = curves[method]
    axes.plot(places, values, color=colour("sft"), linewidth=0.8, alpha=0.45)
    axes.plot(places, running_mean(list(values)), color=colour("sft"), linewidth=2.4, label=method)
    axes.set_title(axes_titles[0])
    axes.set_xlabel(axes_titles[1])
    axes.set_xlim(left=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def return_curve(curves: Mapping[str, tuple[Curve, np.ndarray]], axes_titles: tuple[str, str]) -> Figure:
    """curves: title -> (evaluations' places and mean returns, lowest and highest [2, N]); the first is the method."""
    figure, axes = new_figure(WIDE)
    for number, (title, ((places, means), ends)) in enumerate(curves.items()):
        own, width = (colour("base"), 1.6) if number else (colour("sft"), 2.4)
        dashes = DASHES[number % len(DASHES)]
        axes.plot(places, means, color=own, linewidth=width, linestyle=dashes, label=title)
        axes.fill_between(places, *ends, color=own, alpha=0.15, linewidth=0)
    axes.set_title(axes_titles[0])
    axes.set_xlabel(axes_titles[1])
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
