"""Figures of the merge: overlap of the specialists' task vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.reporting.style import CARD, WIDE, colour, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = 0.45
"""Opacity of a cell of value 1: text on it has a contrast of 4.4:1 in both colour schemes."""


def heat_cells(axes: Any, table: Sequence[Sequence[float | None]], texts: Sequence[Sequence[str]]) -> None:
    """A heat map of shares in [0, 1], by opacity of one colour; None stays empty."""
    from matplotlib.patches import Rectangle

    for row, values in enumerate(table):
        for column, value in enumerate(values):
            share = 0.0 if value is None else min(1.0, max(0.0, value))
            axes.add_patch(
                Rectangle((column - 0.49, row - 0.46), 0.98, 0.92, facecolor=colour("merged"), alpha=FULL * share, linewidth=0)
            )
            axes.text(column, row, texts[row][column], ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(table[0]) - 0.5)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.tick_params(length=0, labelcolor=colour("ink"))
    for side in axes.spines.values():
        side.set_visible(False)


def percent(value: float | None) -> str:
    """A share in per cent, with one decimal below 10 %."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if 0 < value < 0.0995 else f"{100 * value:.0f} %"


def changed_by_group(groups: Sequence[Mapping[str, Any]], domains: Sequence[str]) -> Figure:
    """Share of weights changed by each specialist, and by two or more, by layer and module."""
    columns = [*domains, "two or more"]
    table = [[*(row["changed_fraction"].get(name) for name in domains), row["shared_fraction"]] for row in groups]
    figure, axes = new_figure((WIDE[0], 0.75 + 0.27 * len(table)))
    heat_cells(axes, table, [[percent(value) for value in row] for row in table])
    axes.set_yticks(range(len(groups)), [row["group"] for row in groups])
    axes.set_xticks(range(len(columns)), columns)
    axes.xaxis.tick_top()
    return figure


def overlap_matrix(pairs: Sequence[Mapping[str, Any]], domains: Sequence[str], key: str, title: str) -> Figure:
    """`key` of each pair of specialists, as a symmetric heat map with 1 on the diagonal."""
    known = {frozenset((pair["a"], pair["b"])): pair[key] for pair in pairs}
    table: list[list[float | None]] = [[1.0 if a == b else known.get(frozenset((a, b))) for b in domains] for a in domains]
    texts = [["–" if value is None else f"{value:.2f}" for value in row] for row in table]
    figure, axes = new_figure((CARD[0], 1.0 + 0.5 * max(len(domains), 2)))
    heat_cells(axes, [[None if value is None else abs(value) for value in row] for row in table], texts)
    axes.set_xticks(range(len(domains)), domains)
    axes.set_yticks(range(len(domains)), domains)
    axes.set_title(title)
    return figure


def sharing_histogram(counts: Sequence[int]) -> Figure:
    """Share of weights changed by exactly 0, 1, 2, ... specialists."""
    total = sum(counts) or 1
    figure, axes = new_figure(CARD)
    shares = [100 * count / total for count in counts]
    axes.bar(range(len(counts)), shares, width=0.7, color=colour("merged"))
    for place, share in enumerate(shares):
        label = f"{share:.2g} %" if 0 < share < 1 else f"{share:.1f} %"
        axes.annotate(label, (place, share), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)
    names = {0: "none", 1: "exactly one"}
    axes.set_xticks(range(len(counts)), [names.get(place, str(place)) for place in range(len(counts))])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 112)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("number of specialists")
    axes.set_title("Weights by specialists that changed them, %")
    return figure
