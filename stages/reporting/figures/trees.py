"""Figures of the tree search: one tree, and the calibration of the step-value model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.annotation.nodes import children_of, trees_of
from stages.reporting.style import CARD, WIDE, colour, domain_colour, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Node = Mapping[str, Any]


def node_value(node: Node) -> float:
    """Mean value of a node's visits, W/N; 0 without visits."""
    return node["W"] / node["N"] if node["N"] else 0.0


def normalised(value: float, limits: tuple[float, float]) -> float:
    """`value` scaled from `limits` to [0, 1], clipped."""
    low, high = limits
    return min(1.0, max(0.0, (value - low) / (high - low)))


def example_tree(nodes: Sequence[Node], limits: tuple[float, float] = (0.0, 1.0)) -> list[Node]:
    """The tree whose root value is nearest the middle of `limits`; ties: the largest, then by task id."""
    trees = trees_of(nodes)

    def rank(task: str) -> tuple[float, int, str]:
        return (round(abs(normalised(node_value(trees[task][0]), limits) - 0.5), 1), -len(trees[task]), task)

    return trees[min(trees, key=rank)]


def most_visited_path(tree: Sequence[Node]) -> list[Node]:
    """From the root down, always to the child with most visits (ties: higher value, then lower number)."""
    children, path = children_of(tree), [tree[0]]
    while below := children[path[-1]["node"]]:
        best = min(below, key=lambda number: (-tree[number]["N"], -node_value(tree[number]), number))
        path.append(tree[best])
    return path


def _layout(tree: Sequence[Node]) -> dict[int, float]:
    """Vertical position of every node: leaves one apart in depth-first order, parents at the middle of their children."""
    children, places, leaves = children_of(tree), dict[int, float](), 0
    stack = [(0, False)]
    while stack:
        number, done = stack.pop()
        below = children[number]
        if not below:
            places[number] = float(leaves)
            leaves += 1
        elif done:
            places[number] = (places[below[0]] + places[below[-1]]) / 2
        else:
            stack.append((number, True))
            stack.extend((child, False) for child in reversed(below))
    return places


def search_tree(tree: Sequence[Node], index: int, limits: tuple[float, float] = (0.0, 1.0)) -> Figure:
    """A search tree, root at the left: area is visits, opacity the mean value within `limits` (0 without visits); squares end the
    episode."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    places = _layout(tree)
    by_number = {node["node"]: node for node in tree}
    leaves = max(places.values()) + 1
    figure, axes = new_figure((WIDE[0], min(7.0, max(2.8, 0.95 + 0.085 * leaves))))
    best = {node["node"] for node in most_visited_path(tree)}
    tint = colour(domain_colour(index))
    for node in tree:
        parent = by_number.get(node["parent"])
        if parent is None:
            continue
        on_path = node["node"] in best
        start, end = (parent["depth"], places[parent["node"]]), (node["depth"], places[node["node"]])
        middle = (start[0] + end[0]) / 2
        curve = Path([start, (middle, start[1]), (middle, end[1]), end], [Path.MOVETO, *[Path.CURVE4] * 3])
        line = {
            "edgecolor": colour("ink" if on_path else "base"),
            "linewidth": 1.8 if on_path else 0.7,
            "zorder": 2 if on_path else 1,
        }
        axes.add_patch(PathPatch(curve, facecolor="none", **line))
    top = max(node["N"] for node in tree) or 1
    for marker, ends in (("o", False), ("s", True)):
        chosen = [node for node in tree if bool(node["terminal"]) == ends]
        for node in chosen:
            size = 14 + 170 * node["N"] / top
            where = (node["depth"], places[node["node"]])
            # An opaque base hides the edges below the translucent fill.
            axes.scatter(*where, s=size, marker=marker, color=colour("surface"), edgecolors=tint, linewidths=1, zorder=3)
            fill = normalised(node_value(node), limits) if node["N"] else 0.0
            axes.scatter(*where, s=size, marker=marker, color=tint, alpha=fill, linewidths=0, zorder=4)
    axes.set_ylim(leaves - 0.2, -0.8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    depth = max(node["depth"] for node in tree)
    axes.set_xlim(-0.4, depth + 0.4)
    axes.set_xticks(range(depth + 1))
    axes.set_xlabel("depth")
    return figure


def reliability(bins: Sequence[tuple[float, float, float]], index: int) -> Figure:
    """Reliability diagram of the step-value model: (mean prediction, mean outcome, count) per bin, area by count."""
    figure, axes = new_figure(CARD)
    axes.plot([0, 1], [0, 1], color=colour("muted"), linewidth=1, linestyle="--", label="perfect")
    filled = [item for item in bins if item[2] > 0]
    top = max((count for _, _, count in filled), default=1)
    axes.plot([item[0] for item in filled], [item[1] for item in filled], color=colour(domain_colour(index)), linewidth=1.4)
    for predicted, observed, count in filled:
        axes.scatter(
            predicted, observed, s=14 + 150 * count / top, color=colour(domain_colour(index)), alpha=0.85, linewidths=0, zorder=3
        )
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(-0.05, 1.05)
    axes.set_title("Step values: calibration")
    legend_above(axes)
    axes.set_xlabel("predicted value")
    axes.set_ylabel("success rate of rollouts")
    return figure
