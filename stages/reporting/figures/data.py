"""Figures of data and rollouts: grouped counts, histograms, pass@k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stages.reporting.style import CARD, colour, domain_colour, domain_line, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LABEL = 22


def short(text: str, limit: int = MAX_LABEL) -> str:
    """`text` cut to `limit` characters with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def grouped_counts(rows: Mapping[str, Sequence[tuple[str, float]]], title: str, index: int, label: str) -> Figure:
    """Grouped histograms: series name -> (bin, count), over the union of their bins in order of appearance."""
    bins: list[str] = []
    for series in rows.values():
        bins += [name for name, _ in series if name not in bins]
    figure, axes = new_figure(CARD)
    width = 0.8 / max(len(rows), 1)
    tints = [colour(domain_colour(index)), colour("sft"), colour("base"), colour("merged")]
    for number, (name, series) in enumerate(rows.items()):
        values = dict(series)
        places = [place + (number - (len(rows) - 1) / 2) * width for place in range(len(bins))]
        axes.bar(places, [values.get(item, 0) for item in bins], width=width * 0.94, color=tints[number % len(tints)], label=name)
    step = max(1, -(-len(bins) // 9))
    axes.set_xticks(range(0, len(bins), step), [short(item, 9) for item in bins][::step])
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    axes.set_title(title)
    axes.set_ylabel(label)
    if len(rows) > 1:
        legend_above(axes)
    axes.margins(y=0.12)
    return figure


def histogram(
    values: Sequence[float], title: str, index: int, xlabel: str, ylabel: str, bins: int = 20, log: bool = False
) -> Figure:
    """Histogram of `values`: one bar per integer over a short range, else `bins` equal bins."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    figure, axes = new_figure(CARD)
    integers = bool(np.all(array == np.round(array)))
    if integers and array.max() - array.min() <= 40:
        edges = np.arange(array.min() - 0.5, array.max() + 1.5)
    else:
        edges = np.histogram_bin_edges(array, bins)
    counts, edges = np.histogram(array, edges)
    axes.bar(edges[:-1], counts, width=np.diff(edges) * 0.94, align="edge", color=colour(domain_colour(index)))
    if log:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
        axes.minorticks_off()
    if integers:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="x", visible=False)
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure


def pass_at_k(curves: Mapping[str, Mapping[int, float]], domains: Sequence[str]) -> Figure:
    """pass@k per domain."""
    figure, axes = new_figure(CARD)
    ks: set[int] = set()
    for index, domain in enumerate(domains):
        if domain not in curves:
            continue
        points = sorted(curves[domain].items())
        ks.update(k for k, _ in points)
        shares = [100 * share for _, share in points]
        axes.plot([k for k, _ in points], shares, label=domain, **{**domain_line(index), "markersize": 5})
    axes.set_xticks(sorted(ks) if len(ks) <= 8 else sorted(ks)[:: -(-len(ks) // 8)])
    axes.set_ylim(0, 103)
    axes.set_xlabel("attempts k")
    axes.set_title("Tasks solved, %")
    legend_above(axes)
    return figure
