"""Figures of the search over agent designs: best score so far, tree, predicted scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.reporting.style import CARD, WIDE, colour, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Node = Mapping[str, Any]
METHODS = {"agentswift": ("merged", "-"), "unguided": ("domain0", "--"), "random": ("base", ":")}
"""Method -> colour, line style."""
LABELS = ("covering", "promising", "poor")
ORIGINS = (
    ("params.yaml", ("root",), "ink", "s"),
    ("training set of the value model", LABELS, "sft", "D"),
    ("tree", ("tree",), "merged", "o"),
    ("random", ("random",), "base", "^"),
)
"""Legend, origins of a design, colour, marker."""


def best_so_far(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Best score over evaluations, one line per method."""
    figure, axes = new_figure(CARD)
    for method, best in curves.items():
        tint, dashes = METHODS[method]
        places = range(1, len(best) + 1)
        axes.step(places, [100 * score for score in best], where="post", color=colour(tint), linestyle=dashes, label=method)
    axes.set_title("Best so far")
    axes.set_xlabel("designs evaluated")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("score, %")
    if len(curves) > 1:
        legend_above(axes)
    return figure


def design_tree(nodes: Sequence[Node], winner: str) -> Figure:
    """Evaluated designs by score, in order, with lines to their parents."""
    figure, axes = new_figure((WIDE[0], 3.6))
    for place, node in enumerate(nodes):
        if node["origin"] == "tree":
            parent = nodes[node["parent"]]
            ends = ([node["parent"] + 1, place + 1], [100 * parent["score"], 100 * node["score"]])
            axes.plot(*ends, color=colour("grid"), linewidth=1.0, zorder=1)
    for label, origins, tint, marker in ORIGINS:
        chosen = [place for place, node in enumerate(nodes) if node["origin"] in origins]
        if chosen:
            axes.scatter(
                [place + 1 for place in chosen],
                [100 * nodes[place]["score"] for place in chosen],
                s=[14 + 10 * nodes[place]["visits"] ** 0.5 for place in chosen],
                color=colour(tint),
                marker=marker,
                label=label,
                zorder=2,
            )
    won = next(place for place, node in enumerate(nodes) if node["name"] == winner)
    ring = {"facecolors": "none", "edgecolors": colour("domain1"), "linewidths": 1.8}
    axes.scatter([won + 1], [100 * nodes[won]["score"]], s=150, zorder=3, **ring)
    axes.set_xlabel("evaluation")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("score on validation tasks, %")
    axes.margins(x=0.02, y=0.08)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4, markerscale=0.9)
    return figure


def predictions(nodes: Sequence[Node]) -> Figure:
    """Measured against predicted score, ± one standard deviation of the prediction."""
    figure, axes = new_figure(CARD)
    for label, origins, tint, marker in ORIGINS:
        chosen = [node for node in nodes if node["origin"] in origins and node["predicted"] is not None and not node["failed"]]
        if chosen:
            axes.errorbar(
                [100 * node["predicted"] for node in chosen],
                [100 * node["score"] for node in chosen],
                xerr=[100 * node["std"] for node in chosen],
                fmt=marker,
                color=colour(tint),
                ecolor=colour("grid"),
                elinewidth=1.0,
                label=label,
            )
    low, high = axes.get_ylim()
    axes.plot([low, high], [low, high], color=colour("muted"), linewidth=0.9, linestyle=":", zorder=0)
    axes.set_title("Predicted and measured")
    axes.set_xlabel("predicted score, %")
    axes.set_ylabel("measured score, %")
    return figure
