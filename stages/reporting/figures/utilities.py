"""Utilities of outcomes, one mark per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stages.reporting.style import CARD, domain_line, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 36


def utility_dots(outcomes: Sequence[str], utilities: Mapping[str, Sequence[float]]) -> Figure:
    """Rows are outcomes, from the top; `utilities`: model -> one number per outcome."""
    figure, axes = new_figure((2 * CARD[0], max(CARD[1], 0.6 + 0.24 * len(outcomes))))
    places = range(len(outcomes) - 1, -1, -1)
    for index, (model, values) in enumerate(utilities.items()):
        style = {**domain_line(index), "linestyle": "none"}
        axes.plot(values, list(places), label=model, **style)
    axes.set_yticks(list(places), [text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in outcomes])
    axes.set_xlabel("utility, standard deviations")
    legend_above(axes)
    return figure
