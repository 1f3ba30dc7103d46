"""Figures of the patterns of behaviour: by model, and over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.reporting.style import WIDE, colour, domain_colour, domain_line, legend_above, new_figure
from stages.reporting.viewer.prevalence import Prevalence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = ("o", "D", "s", "^")
STEP = 0.2
"""Distance between the marks of one pattern."""


def by_model(found: Sequence[Prevalence], titles: Sequence[tuple[str, str]], models: Sequence[tuple[str, str]]) -> Figure:
    """Shares per pattern (rows) and model (marks), with intervals. titles: (pattern, title); models: (source, colour)."""
    figure, axes = new_figure((WIDE[0], 1.0 + 0.2 * (len(models) + 1) * len(titles)))
    shares = {(one.pattern, one.source): one for one in found}
    for number, (source, tint) in enumerate(models):
        places, offset = [], STEP * (number - (len(models) - 1) / 2)
        for row, (pattern, _) in enumerate(titles):
            one = shares.get((pattern, source))
            if one is None:
                continue
            places.append((100 * one.share, row + offset))
            if one.low is not None and one.high is not None:
                axes.plot([100 * one.low, 100 * one.high], [row + offset] * 2, color=colour(tint), linewidth=2)
        style = {"marker": MARKERS[number % len(MARKERS)], "linestyle": "none", "markersize": 6}
        axes.plot(*zip(*places, strict=True), color=colour(tint), label=source, **style)
    axes.set_yticks(range(len(titles)), [title for _, title in titles])
    axes.set_ylim(len(titles) - 0.5, -0.5)
    axes.set_xlim(-2, 102)
    axes.set_title("Share of episodes, %")
    axes.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    legend_above(axes)
    return figure


def over_training(points: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> Figure:
    """Share of episodes per pattern over the stored steps of RL. points: (title, [(step, share)])."""
    figure, axes = new_figure(WIDE)
    for number, (title, line) in enumerate(points):
        axes.plot([step for step, _ in line], [100 * share for _, share in line], label=title, **domain_line(number))
    axes.set_ylim(-2, 102)
    first = min((step for _, line in points for step, _ in line), default=1)
    axes.set_xlabel("RL step" if first else "RL step; 0: the SFT policy's rollouts")
    axes.set_title("Share of episodes, %")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def model_colours(domain_index: int, domain: str) -> list[tuple[str, str]]:
    """(source, palette name) of the models in the figure of a domain."""
    return [("sft", "sft"), (f"rl@{domain}", domain_colour(domain_index)), ("merged", "merged")]
